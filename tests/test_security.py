"""Nothing foreign is executed, secrets stay out of what a run leaves, and texts of others stay texts."""

import ast
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.web import Answer, Script, serving
from integration.tiny import config
from PIL import Image

from recast_lightning.cli import main
from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.proposals.folder import FolderProposals
from recast_lightning.report import write_report

ROOT = Path(__file__).parents[1]
SOURCES = [
    file
    for place in ("recast_lightning", "callbacks", "examples", "benchmarks")
    for file in (ROOT / place).rglob("*.py")
]
SECRET = "sk-very-hidden-0123456789"
FORBIDDEN = {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load", "yaml.unsafe_load",
             "yaml.full_load", "os.system", "os.popen", "joblib.load", "dill.load", "dill.loads", "marshal.loads"}  # fmt: skip
NO_WEIGHTS = ("Config", "Tokenizer", "Processor", "ProcessorPil", "Scheduler")  # what these read is JSON


def offences(source: str) -> list[str]:
    """What a source does that could execute foreign code, as line: call."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        owner, _, method = name.rpartition(".")
        unsafe_weights = given.get("weights_only") != "True" and given.get("use_safetensors") != "True"
        if (
            name in FORBIDDEN
            or (name == "torch.load" and given.get("weights_only") != "True")
            or (name.endswith("np.load") and given.get("allow_pickle", "False") != "False")
            or given.get("shell", "False") != "False"
            or given.get("trust_remote_code", "False") != "False"
            or (method == "from_pretrained" and unsafe_weights and not owner.endswith(NO_WEIGHTS))
            or (method == "load_from_checkpoint" and given.get("weights_only") != "True")
        ):
            found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_source_executes_what_it_reads(file):
    assert offences(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(x)", "torch.load(x, weights_only=False)", "pickle.loads(x)", "yaml.load(x, Loader=L)", "eval(x)",
        "subprocess.run(x, shell=True)", "CLIPModel.from_pretrained(p)",
        "AutoTokenizer.from_pretrained(p, trust_remote_code=True)",
        "np.load(x, allow_pickle=True)",
    ],
)  # fmt: skip
def test_offences_are_seen(source):
    assert len(offences(source)) == 1


def test_a_policy_of_pickles_is_refused(tmp_path):
    """Where there are no safetensors, diffusers would fall back to .bin files."""
    shutil.copytree(ROOT / "recast_lightning/signboard/weights/base", tmp_path / "base")
    weights = tmp_path / "base/transformer/diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(UserError, match="safetensors"):
        Policy(path=str(tmp_path / "base")).load()


# Secrets -------------------------------------------------------------------------------------------------------------


def files_with(secret: str, folder: Path) -> list[str]:
    """Files under a folder that hold a text, whatever else they are."""
    return [str(file) for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def test_a_server_s_key_is_in_nothing_that_a_run_leaves(tmp_path, monkeypatch, capfd, caplog):
    def refuse(request):
        return Answer({"error": {"message": f"the key {SECRET} is not good enough"}}, status=403)

    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.chdir(tmp_path)
    with serving(Script(otherwise=refuse)) as server:
        judge = {
            "class_path": "recast_lightning.rewards.UnifiedReward",
            "init_args": {"base_url": f"{server.url}/v1", "model": "judge", "api_key_env": "JUDGE_KEY"},
        }
        loggers = [
            {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": "run"}},
            {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": "runs", "offline": True}},
        ]
        stage = {"name": "all", "epochs": 1, "budgets": {"clip": 1, "judge": 0}, "credit": "static"}
        clip = {"class_path": "recast_lightning.rewards.ClipScore", "init_args": {"model": "signboard:clip"}}
        changes = {
            "model__rewards": {"judge": judge, "clip": clip},
            "model__stages": [stage],
            "trainer__logger": loggers,
        }
        main(
            [
                "fit",
                "-c",
                str(config(tmp_path, **changes, trainer__num_sanity_val_steps=0, trainer__limit_val_batches=0)),
            ]
        )
        headers = {request[2].get("authorization") for request in server.requests}
    assert headers == {f"Bearer {SECRET}"}  # it was used, and the server told it back
    assert list(tmp_path.glob("runs/wandb/offline-run-*"))
    assert list(tmp_path.glob("runs/run/version_0/config.yaml"))
    assert files_with("JUDGE_KEY", tmp_path / "runs/run")
    assert files_with(SECRET, tmp_path) == []
    said = capfd.readouterr()
    assert "the key *** is not good enough" in caplog.text
    assert SECRET not in said.out + said.err + caplog.text


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@localhost:1/score",
        f"http://{SECRET}@localhost:1/score",
        f"http://localhost:1/score?api_key={SECRET}",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    reward = {"class_path": "recast_lightning.rewards.HTTPReward", "init_args": {"url": url, "positive_map": "sigmoid"}}
    file = config(tmp_path, model__rewards__clip=reward)
    given = file.read_text()
    file.unlink()
    (tmp_path / "given").mkdir()
    (tmp_path / "given/config.yaml").write_text(given)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", "given/config.yaml"])
    said = capfd.readouterr()
    assert stop.value.code == 2
    assert "leave it out" in said.err
    assert SECRET not in said.out + said.err
    assert files_with(SECRET, tmp_path) == [str(tmp_path / "given/config.yaml")]


# Texts of others -----------------------------------------------------------------------------------------------------


def test_a_report_escapes_what_it_shows(tmp_path):
    bad = "<script>alert(1)</script>"
    run = tmp_path / "<script>run"
    (run / "images/0000").mkdir(parents=True)
    evaluation = {
        "rollout": 0,
        "stage": bad,
        "metrics": {bad: 0.5},
        "stderr": {bad: 0.1},
        "failed": {bad: 1},
        "count": 2,
    }
    lines = [evaluation, {**evaluation, "rollout": 1, "metrics": {bad: 0.6}}]
    (run / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rollout = {"rollout": 1, "stage": bad, "metrics": {f"reward/{bad}/mean": 0.1}}
    (run / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    (run / "config.yaml").write_text(f"model: {{policy: '{bad}'}}\n")
    page = write_report(run).read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 3


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "link.png", "a/../../secret.png"])
def test_proposals_do_not_leave_their_folder(name, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    folder = tmp_path / "proposals"
    folder.mkdir()
    os.symlink(tmp_path / "secret.png", folder / "link.png")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": name, "prompt": "a dog"}) + "\n")
    with pytest.raises(ValueError, match="which is outside of it"):
        FolderProposals(str(folder)).images([Prompt("a dog")], 8, 8)


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "a dog"}', "3"])
def test_a_malformed_list_of_proposals_is_one_sentence(line, tmp_path):
    (tmp_path / "metadata.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2: expected"):
        FolderProposals(str(tmp_path)).validate([Prompt("a dog")])


def test_the_example_server_listens_on_this_machine_alone_by_default(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("reward_server", ROOT / "examples/reward_server.py")
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)

    def listen(reward, host, port):
        raise OSError(f"asked for {host}")

    monkeypatch.setattr(server, "RewardServer", listen)
    assert server.main(["helpers.toy_rewards.Brightness"]) == 2
    assert "asked for 127.0.0.1" in capsys.readouterr().err
