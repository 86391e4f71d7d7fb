"""Every snippet and command of README, docs and configurations runs as it is printed, or as `COMMANDS` says and why.

A new one is found by itself, and fails in a language or with a program that stands nowhere here.
"""

import importlib.util
import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from lightning.pytorch.cli import LightningCLI
from PIL import Image
from torch.distributed.run import get_args_parser

from recast_lightning.cli import main
from recast_lightning.cli.entry import PLAIN_COMMANDS, TRAINER_COMMANDS
from recast_lightning.cli.lightning_cli import RecastCLI
from recast_lightning.prompts import read_prompts
from recast_lightning.proposals import FolderProposals
from recast_lightning.rewards.geneval.geneval import check_metadata

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md", *sorted(ROOT.glob("docs/*.md"))]
DEMO = "configs/signboard/demo.yaml"
STAND_INS = {"…": DEMO, "N": "3", "S": "1", "FILE": "prompts.jsonl", "geneval|ocr|signboard": "geneval"}
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.M | re.S)
ACCEPTED: set[tuple[str, ...]] = set()  # commands that need not be parsed again


class Snippet(NamedTuple):
    """A fenced block; or, as "bash", a command between backticks or in a configuration's comment."""

    page: Path
    language: str
    text: str


def fenced(page: Path) -> list[Snippet]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Snippet(page, language, re.sub(f"^{indent}", "", text, flags=re.M)) for indent, language, text in found]


def unfenced(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def snippets() -> list[Snippet]:
    spans = [(page, " ".join(span.split())) for page in PAGES for span in re.findall(r"`([^`]+)`", unfenced(page))]
    inline = [(page, span) for page, span in spans if " " in span and program(words_of(span)) in COMMANDS]
    for file in sorted(ROOT.glob("configs/**/*.yaml")):
        inline += [(file, line) for line in re.findall(r"^# +(recast .*)$", file.read_text(encoding="utf-8"), re.M)]
    blocks = [block for page in PAGES for block in fenced(page)]
    return blocks + [Snippet(page, "bash", line) for page, line in dict.fromkeys(inline)]


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in code of another kind
        return []


def program(words: list[str]) -> str:
    """The first word that is no `NAME=value`."""
    return next((word for word in words if not re.match(r"[A-Z_]+=", word)), "")


# --- What stands for each program -------------------------------------------------------------------------------------


def recast(words, monkeypatch, capsys):
    command, *options = words
    if not options or tuple(words) in ACCEPTED:  # only named in a sentence; or seen before
        assert command in {*TRAINER_COMMANDS, *PLAIN_COMMANDS}
    elif command in TRAINER_COMMANDS:
        targets = LightningCLI.subcommands().get(command, {"model", "datamodule"})
        monkeypatch.setattr(RecastCLI, "subcommands", staticmethod(lambda: {command: targets}))
        with pytest.raises(SystemExit) as stop:
            main([*words, *([] if "help" in words[-1] or "help" in words[-2] else ["--print_config"])])
        assert stop.value.code == 0, capsys.readouterr().err
    else:
        if command != "prompts":
            monkeypatch.setattr(import_module(f"recast_lightning.cli.{command}"), "run", lambda options: None)
        main(words)
    ACCEPTED.add(tuple(words))


def python(words, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(words[0]).parent)
    if words[0] != "examples/reward_server.py":
        assert runpy.run_path(words[0])["main"]
        return
    spec = importlib.util.spec_from_file_location("reward_server", words[0])
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    monkeypatch.setattr(server.RewardServer, "serve_forever", lambda self: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert server.main([*words[1:], "--port", "0"]) == 0, capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)


def torchrun(words, monkeypatch, capsys):
    found = get_args_parser().parse_args(words)
    assert (found.module, found.training_script) == (True, "recast_lightning")
    recast(found.training_script_args, monkeypatch, capsys)


def srun(words, monkeypatch, capsys):
    assert words[0] == "recast"
    recast(words[1:], monkeypatch, capsys)


def make(words, monkeypatch, capsys):
    done = subprocess.run(["make", "--dry-run", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def pytest_(words, monkeypatch, capsys):
    assert all(Path(word).is_dir() for word in words)


def nothing(words, monkeypatch, capsys):
    pass


COMMANDS = {  # program → what stands for it, and why
    "recast": (recast, "`prompts` runs; the others go through their own parser: a run takes minutes"),
    "python": (python, "the reward server loads and stops at once; benchmarks are imported only, as they take minutes"),
    "torchrun": (torchrun, "goes through its own parser, and the command in it: needs 16 GPUs"),
    "srun": (srun, "the command in it goes through its parser: needs a cluster"),
    "make": (make, "a dry run: the real ones set up an environment"),
    "pytest": (pytest_, "the folder must be there"),
    "mkdir": (None, "runs in a shell"),
    "head": (None, "runs in a shell"),
    "tail": (None, "runs in a shell"),
    "curl": (nothing, "needs a server; test_reward_server.py asks it for the same path"),
    "vllm": (nothing, "needs a GPU and a model of 8B weights"),
    "ssh": (nothing, "needs another machine"),
    "hf": (nothing, "needs an account"),
    "wandb": (nothing, "needs an account"),
}


# --- What is done in each language ------------------------------------------------------------------------------------


def run_bash(text, monkeypatch, capsys):
    for line in filter(words_of, text.replace("\\\n", " ").splitlines()):
        # With and without what may be left out: [--option VALUE]
        for form in dict.fromkeys(re.sub(r"\[(-.*?)\](?=\s|$)", part, line) for part in ("", r"\1")):
            words = [STAND_INS.get(word, word) for word in words_of(form)]
            if words[0] == "export" or not program(words):
                continue
            assert program(words) in COMMANDS, f"no one runs {line!r}: say in COMMANDS how, or why not"
            stands_in, _ = COMMANDS[program(words)]
            if stands_in:
                stands_in(words[words.index(program(words)) + 1 :], monkeypatch, capsys)
            else:
                subprocess.run(form, shell=True, check=True, timeout=60)


def run_python(text, monkeypatch, capsys):
    exec(compile(text, "snippet", "exec"), {"__name__": "snippet"})


def run_yaml(text, monkeypatch, capsys):
    """It goes on top of the file that it names, else of the demo's."""
    overlay = re.match(r"# Overlay for (\S+\.yaml)", text)
    Path("overlay.yaml").write_text(text, encoding="utf-8")
    ACCEPTED.discard(words := ("fit", "-c", overlay[1] if overlay else DEMO, "-c", "overlay.yaml"))
    recast(words, monkeypatch, capsys)


def run_json(text, monkeypatch, capsys):
    """A line of a file of prompts, or of a folder of proposals."""
    line = json.loads(text)
    Path("metadata.jsonl").write_text(json.dumps(line), encoding="utf-8")
    (prompt,) = read_prompts("metadata.jsonl", ocr="ocr" in line)
    if "include" in line:
        check_metadata(prompt.metadata)
    if "file_name" in line:
        Image.new("RGB", (80, 60)).save(line["file_name"])
        assert FolderProposals(".").images([prompt], 64, 64).shape == (1, 3, 64, 64)


LANGUAGES = {"bash": run_bash, "python": run_python, "yaml": run_yaml, "json": run_json}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A place like a checkout, with the files that the pages tell to save."""
    for name in ("configs", "recast_lightning", "benchmarks", "examples", "tests", "Makefile", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "constraints.txt").symlink_to(ROOT / "constraints.txt")
    (tmp_path / "my.yaml").symlink_to(ROOT / DEMO)
    page = fenced(ROOT / "docs/configuration.md")
    for name, holding in (("my_rewards.py", "class JpegSize"), ("jpeg.yaml", "my_rewards.JpegSize")):
        (text,) = (text for _, language, text in page if holding in text and language != "bash")
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize("snippet", snippets(), ids=lambda s: f"{s.page.name}-{s.text.strip().splitlines()[0][:50]}")
def test_it_runs_as_printed(snippet, checkout, monkeypatch, capsys):
    if snippet.language == "text":  # to be read
        return
    assert snippet.language in LANGUAGES, f"no one runs {snippet.language!r}; what is only to be read is text"
    LANGUAGES[snippet.language](snippet.text, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_is_fenced_and_so_found(page):
    indented = [line.strip() for line in unfenced(page).splitlines() if line.startswith("    ")]
    assert not [line for line in indented if line.startswith(("{", '"')) or program(words_of(line)) in COMMANDS]


def test_the_table_has_no_program_that_no_one_names():
    lines = [line for s in snippets() if s.language == "bash" for line in s.text.replace("\\\n", " ").splitlines()]
    assert {program(words_of(line)) for line in lines} >= COMMANDS.keys()


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "frobnicate --all"),
        ("bash", "recast fit -c configs/signboard/demo.yaml --model.bet 1"),
        ("bash", "recast weights A/profile --budget ocr=2"),
        ("bash", "make everything"),
        ("bash", "python benchmarks/none.py"),
        ("python", "pipeline = StableDiffusion3Pipeline()"),
        ("yaml", "model: {rewards: {ocr: {class_path: recast_lightning.rewards.OCR, init_args: {detects: 1}}}}"),
        ("json", '{"prompt": "a cat", "include": [{"class": "cat"}]}'),
    ],
)
def test_a_wrong_one_fails(language, text, checkout, monkeypatch, capsys):
    with pytest.raises((AssertionError, FileNotFoundError, NameError, SystemExit, ValueError)):
        LANGUAGES[language](text, monkeypatch, capsys)
