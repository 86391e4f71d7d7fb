"""Every configuration that is shipped is accepted by the real command line, and says at its top what it is for."""

import re
from functools import reduce
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from recast_lightning.cli import main
from recast_lightning.cli.lightning_cli import RecastCLI
from recast_lightning.credit.plan import make_plan
from recast_lightning.rollout.samples import check_sizes

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
SD35 = CONFIGS / "sd35_medium"


def bases_of(file: Path) -> list[Path]:
    """The files that an overlay goes on top of, by its first line: `# Overlay for <file> and <file>: …`."""
    first = file.read_text(encoding="utf-8").splitlines()[0]
    found = re.match(r"# Overlay for ([^:]+)", first)
    return [(file.parent / base).resolve() for base in re.findall(r"\S+\.yaml", found[1])] if found else []


def chains(file: Path) -> list[list[Path]]:
    """The ways to give a file to `recast fit`: the files before it in order, and itself."""
    return [[*before, file] for base in bases_of(file) for before in chains(base)] or [[file]]


def combinations(stage: str) -> list[list[Path]]:
    """A stage of SD3.5-Medium with no or one overlay of each kind, in each way."""
    globs = ("hardware/*.yaml", f"budgets/{stage}_*.yaml", "old_policy/*.yaml", "estimator/*.yaml")
    kinds = [SD35.glob(pattern) for pattern in globs]
    choices = product(*([[], *([file] for file in sorted(files))] for files in kinds))
    return [[SD35 / f"{stage}.yaml", *chain.from_iterable(choice)] for choice in choices]


ALL = [files for stage in ("ocr", "geneval") for files in combinations(stage)]
SINGLE = [files for file in FILES if file.parent.parent != SD35 for files in chains(file)]


def some() -> list[list[Path]]:
    """Of all combinations, so many that each overlay comes on top of each of its files."""
    missing = {(files[0], overlay) for files in ALL for overlay in files[1:]}
    taken = []
    while missing:
        taken.append(max(ALL, key=lambda files: len(missing & {(files[0], overlay) for overlay in files[1:]})))
        missing -= {(taken[-1][0], overlay) for overlay in taken[-1][1:]}
    return taken


def merged(given: Any, overlay: Any) -> Any:
    """What two files say together: dictionaries join, lists of one length item by item; all else is replaced."""
    if isinstance(given, list) and isinstance(overlay, list) and len(given) == len(overlay):
        return [merged(*pair) for pair in zip(given, overlay, strict=True)]
    if not (isinstance(given, dict) and isinstance(overlay, dict)):
        return overlay
    return given | {key: merged(given.get(key), value) for key, value in overlay.items()}


def read(files: list[Path]) -> Any:
    return reduce(merged, (yaml.safe_load(file.read_text(encoding="utf-8")) for file in files))


def name_of(files: list[Path]) -> str:
    return " + ".join(str(file.relative_to(CONFIGS)) for file in files)


def differences(given: Any, resolved: Any, where: str = "") -> list[str]:
    """Where the resolved configuration does not say what a file says."""
    if isinstance(given, dict):
        if not isinstance(resolved, dict):
            return [f"{where}: {given!r} became {resolved!r}"]
        if "init_args" in resolved and "class_path" not in given:  # the default class of a group
            resolved = resolved["init_args"]
        return [d for key in given for d in differences(given[key], resolved.get(key), f"{where}.{key}")]
    if isinstance(given, list):
        if not isinstance(resolved, list) or len(given) != len(resolved):
            return [f"{where}: {given!r} became {resolved!r}"]
        return [
            d for i, (g, r) in enumerate(zip(given, resolved, strict=True)) for d in differences(g, r, f"{where}.{i}")
        ]
    if where.endswith(".class_path"):
        given, resolved = (str(path).rpartition(".")[2] for path in (given, resolved))
    return [] if given == resolved or str(given) == str(resolved) else [f"{where}: {given!r} became {resolved!r}"]


def test_there_are_configurations():
    assert CONFIGS / "signboard/demo.yaml" in FILES
    assert bases_of(CONFIGS / "signboard/static.yaml") == [CONFIGS / "signboard/full.yaml"]
    assert bases_of(SD35 / "hardware/ddp_8.yaml") == [SD35 / "ocr.yaml", SD35 / "geneval.yaml"]
    assert len(ALL) == 2 * 5 * 5 * 2 * 2
    assert not list(CONFIGS.rglob("*.yml")), "use .yaml, which is what these tests look at"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_every_file_says_what_it_is(file):
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# \S.{10,}", first)
    assert all(base in FILES for base in bases_of(file))


def test_overlays_of_different_kinds_do_not_touch_each_other():
    """So their order does not matter."""

    def keys(node: Any, where: str = "") -> set[str]:
        return set().union(*(keys(v, f"{where}.{k}") for k, v in node.items())) if isinstance(node, dict) else {where}

    kinds = [
        set().union(*(keys(read([f])) for f in SD35.glob(f"{kind}/*")))
        for kind in ("hardware", "budgets", "old_policy", "estimator")
    ]
    assert all(kinds)
    assert sum(map(len, kinds)) == len(set().union(*kinds))


@pytest.mark.parametrize("page", [*SD35.glob("*.yaml"), CONFIGS.parent / "docs/sd35.md"], ids=lambda f: f.name)
def test_files_that_are_named_are_there(page):
    """In commands from the root, and elsewhere by their place in the folder."""
    named = re.findall(r"[\w/]*\w\.yaml", page.read_text(encoding="utf-8"))
    assert len(named) > 2
    for name in named:
        assert ((CONFIGS.parent if name.startswith("configs") else SD35) / name).is_file(), name


@pytest.fixture
def resolved(monkeypatch, capsys):
    """What `recast fit -c … -c … --print_config` comes to."""
    fit = {"fit": LightningCLI.subcommands()["fit"]}
    monkeypatch.setattr(RecastCLI, "subcommands", staticmethod(lambda: fit))  # the others' parsers take twice the time

    def resolve(files: list[Path]) -> Any:
        with pytest.raises(SystemExit) as stop:
            main(["fit", *(argument for file in files for argument in ("-c", str(file))), "--print_config"])
        printed = capsys.readouterr()
        assert stop.value.code == 0, printed.err
        return yaml.safe_load(printed.out)

    return resolve


def check(files: list[Path], found: Any) -> None:
    assert differences(read(files), found) == []
    assert found["model"]["policy"]["class_path"] == "recast_lightning.policy.Policy"
    for reward in found["model"]["rewards"].values():
        assert "init_args" in reward
    assert {name for stage in found["model"]["stages"] for name in stage["budgets"]} <= set(found["model"]["rewards"])
    assert any(c["class_path"] == "recast_lightning.callbacks.RunReport" for c in found["trainer"]["callbacks"])


@pytest.mark.parametrize("files", [*SINGLE, *some()], ids=name_of)
def test_the_command_line_accepts_it(files, resolved):
    check(files, resolved(files))


def test_an_overlay_may_give_single_keys_of_a_group(resolved, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model: {objective: {advantage_clip: 4.0}, rollout: {batch_size: 12}}")
    base, found = (resolved([CONFIGS / "signboard/demo.yaml", *more])["model"] for more in ([], [overlay]))
    assert found["objective"]["init_args"] == base["objective"]["init_args"] | {"advantage_clip": 4.0}
    assert found["rollout"] == base["rollout"] | {"batch_size": 12}


@pytest.mark.slow
@pytest.mark.parametrize("files", ALL, ids=name_of)
def test_the_command_line_accepts_every_combination(files, resolved):
    check(files, resolved(files))


@pytest.mark.parametrize(
    "files", [f for f in ALL if len(f) == 1 or [o.parent.name for o in f[1:]] == ["hardware"]], ids=name_of
)
def test_an_optimizer_step_sees_one_whole_rollout_on_any_hardware(files):
    found = read(files)
    model, data, trainer = found["model"], found["data"], found["trainer"]
    processes = trainer["devices"] * trainer.get("num_nodes", 1)
    size = model["rollout"]["micro_batch_size"]
    check_sizes(data["prompts_per_rollout"], data["group_size"], size, processes)
    batches = data["prompts_per_rollout"] * data["group_size"] // processes // size
    assert trainer["accumulate_grad_batches"] == batches * int(0.99 * 25)
    strategy = trainer.get("strategy", "ddp")
    assert strategy == "ddp" or strategy["init_args"]["data_parallel_size"] == processes


@pytest.mark.parametrize("stage", ["ocr", "geneval"])
def test_the_papers_estimator_changes_how_a_profile_is_measured_and_nothing_else(stage):
    plain = read([SD35 / f"{stage}.yaml"])
    paper = read([SD35 / f"{stage}.yaml", SD35 / "estimator/paper.yaml"])
    how = paper["trainer"]["callbacks"][0]["init_args"]
    measured = {"posterior": "ode", "levels": None, "steps": "grid", "shrinkage": "none"}
    assert how == plain["trainer"]["callbacks"][0]["init_args"] | measured
    assert make_plan(torch.linspace(0, 1, 26), rollouts=1, steps="grid", levels=None).calls == list(range(1, 26))
    how |= plain["trainer"]["callbacks"][0]["init_args"]
    for name in measured.keys() - plain["trainer"]["callbacks"][0]["init_args"].keys():
        del how[name]
    assert paper == plain


@pytest.mark.parametrize("stage", ["ocr", "geneval"])
def test_the_five_budgets_are_uniform_and_each_reward_doubled(stage):
    choices = ([SD35 / f"{stage}.yaml"], *(files for file in SD35.glob(f"budgets/{stage}_*") for files in chains(file)))
    found = [read(files)["model"]["stages"] for files in choices]
    (warmup,) = {tuple(stages[0]["budgets"].items()) for stages in found}
    assert warmup == (("clip", 1), ("hpsv2", 1), ("pickscore", 1))
    names = ["clip", "hpsv2", "pickscore", stage]
    expected = {(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)}
    assert {tuple(stages[1]["budgets"][name] for name in names) for stages in found} == expected
    for file in SD35.glob(f"budgets/{stage}_*"):
        assert read(chains(file)[0])["model"]["stages"][1]["budgets"][file.stem.rpartition("_")[2]] == 2
    assert len({(s["name"], s["epochs"]) for stages in found for s in stages}) == 2


def test_both_stages_are_the_papers_and_differ_in_their_reward_alone():
    ocr, geneval = (read([SD35 / f"{stage}.yaml"]) for stage in ("ocr", "geneval"))
    policy = ocr["model"]["policy"]["init_args"]
    assert policy == geneval["model"]["policy"]["init_args"]
    sizes = [policy[key] for key in ("height", "width", "num_steps", "solver", "lora_rank", "lora_alpha")]
    assert sizes == [512, 512, 25, "dpm2", 32, 64]
    for found in (ocr, geneval):
        model, data = found["model"], found["data"]
        assert model["objective"] == {"beta": 0.1, "kl_weight": 1e-4}
        assert (model["optimizer"], model["ema_decay"]) == ({"learning_rate": 3e-4}, 0.9)
        assert (model["rollout"]["timestep_fraction"], model["old_policy"]) == (0.99, {"rate": 0.001, "maximum": 0.5})
        assert (data["prompts_per_rollout"], data["group_size"]) == (48, 24)
    for found, stage in ((ocr, "ocr"), (geneval, "geneval")):
        del found["model"]["rewards"][stage], found["model"]["stages"], found["trainer"]["logger"]
        del (
            found["data"]["train"],
            found["data"]["validation"],
            found["trainer"]["callbacks"][0]["init_args"]["proposals"],
        )
    del ocr["model"]["scoring"]  # for OCR, which works on the CPU
    assert ocr == geneval
