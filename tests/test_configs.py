"""Every configuration that is shipped is accepted by the real command line, and says at its top what it is for."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from recast_lightning.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


def base_of(file: Path) -> Path | None:
    """The file that an overlay goes on top of, by its first line: `# Overlay for <file>`."""
    found = re.match(r"# Overlay for (\S+\.yaml)", file.read_text(encoding="utf-8"))
    return (file.parent / found[1]).resolve() if found else None


def chain(file: Path) -> list[Path]:
    """The files to give to `recast fit`, in order."""
    base = base_of(file)
    return [*(chain(base) if base else []), file]


def differences(given: Any, resolved: Any, where: str = "") -> list[str]:
    """Where the resolved configuration does not say what a file says."""
    if isinstance(given, dict):
        if not isinstance(resolved, dict):
            return [f"{where}: {given!r} became {resolved!r}"]
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
    assert base_of(CONFIGS / "signboard/static.yaml") == CONFIGS / "signboard/full.yaml"
    assert not list(CONFIGS.rglob("*.yml")), "use .yaml, which is what these tests look at"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_every_file_says_what_it_is(file):
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# \S.{10,}", first)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_the_command_line_accepts_it(file, capsys):
    files = chain(file)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(argument for f in files for argument in ("--config", str(f))), "--print_config"])
    printed = capsys.readouterr()
    assert stop.value.code == 0, printed.err
    resolved = yaml.safe_load(printed.out)
    assert differences(yaml.safe_load(file.read_text(encoding="utf-8")), resolved) == []
    assert resolved["model"]["policy"]["class_path"] == "recast_lightning.policy.Policy"
    for reward in resolved["model"]["rewards"].values():
        assert "init_args" in reward
    assert {name for stage in resolved["model"]["stages"] for name in stage["budgets"]} <= set(
        resolved["model"]["rewards"]
    )
    assert any(c["class_path"] == "recast_lightning.callbacks.RunReport" for c in resolved["trainer"]["callbacks"])
