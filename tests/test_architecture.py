"""The shape of the code: who may import whom, what is shipped, and that importing is cheap."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "recast_lightning"
NAME = PACKAGE.name
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}

PURE = ("credit", "flow.py", "objective.py", "seeds.py")
BELOW_LIGHTNING = (
    *PURE, "rewards", "policy", "prompts.py", "proposals.py", "rollout.py", "stages.py", "numerics.py", "report"
)  # fmt: skip


def files_of(*places: str) -> list[Path]:
    """Python files of folders and files of the package; the linked callbacks only where they are asked for."""
    found = []
    for place in places:
        path = PACKAGE / place
        assert path.exists(), f"{place} is gone: bring the rules of this file up to date"
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [file for file in found if "callbacks" in places or "callbacks" not in file.relative_to(PACKAGE).parts]


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Full dotted names of all that a file imports anywhere, lazily and for type checkers, too."""
    names: set[str] = set()
    package = [NAME, *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def roots_of(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(file)}


def reached_from(file: Path) -> set[Path]:
    """The files of this package that a file imports, directly or not, and the file itself."""
    seen, waiting = set(), [file]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports_of(current):
            parts = name.split(".")
            for i in range(1, len(parts) + 1) if parts[0] == NAME else ():
                stem = ROOT.joinpath(*parts[:i])
                waiting += [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return seen


@pytest.mark.parametrize("file", files_of(*PURE), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_the_method_is_tensor_code_alone(file):
    for reached in reached_from(file):
        forbidden = roots_of(reached) & {*LIGHTNING, "diffusers", "peft", "transformers"}
        assert not forbidden, f"{file.name} reaches {reached.relative_to(ROOT)}, which imports {forbidden}"


@pytest.mark.parametrize("file", files_of(*BELOW_LIGHTNING), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_what_lies_below_lightning_does_not_import_it(file):
    for reached in reached_from(file):
        forbidden = roots_of(reached) & LIGHTNING
        assert not forbidden, f"{file.name} reaches {reached.relative_to(ROOT)}, which imports {forbidden}"


def test_diffusers_and_peft_are_touched_in_one_place():
    users = {file.relative_to(PACKAGE) for file in files_of(".", "callbacks") if roots_of(file) & {"diffusers", "peft"}}
    assert Path("policy/policy.py") in users
    assert {user.parts[0] for user in users} == {"policy", "signboard"}


def test_only_the_command_line_knows_the_callbacks():
    users = {
        file.relative_to(PACKAGE)
        for file in files_of(".")
        if any(f"{name}.".startswith(f"{NAME}.callbacks.") for name in imports_of(file))
    }
    assert users == {Path("lightning_cli.py"), Path("profile_command.py")}


def test_imports_are_read_as_meant():
    """The rules above are worth what `imports_of` sees."""
    assert "recast_lightning.callbacks.renyi_profiler.RenyiProfilerCallback" in imports_of(
        PACKAGE / "callbacks/__init__.py"
    )
    assert "diffusers.StableDiffusion3Pipeline" in imports_of(PACKAGE / "policy/policy.py")
    assert PACKAGE / "seeds.py" in reached_from(PACKAGE / "credit/estimate.py")


def test_every_package_is_listed_for_the_wheel():
    tomllib = pytest.importorskip("tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = [
        PACKAGE,
        *(file.parent for file in files_of(".") if file.name == "__init__.py" and file.parent != PACKAGE),
    ]
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert set(setuptools["packages"]) == packages | {f"{NAME}.callbacks"}
    assert setuptools["package-dir"] == {f"{NAME}.callbacks": "callbacks"}
    assert (ROOT / "callbacks/__init__.py").is_file()


def test_callbacks_are_linked_into_the_package():
    link = PACKAGE / "callbacks"
    assert link.is_symlink()
    assert os.readlink(link) == "../callbacks"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("recast_lightning", ("torch", "transformers", "diffusers", "lightning")),
        ("recast_lightning.rewards", ("transformers", "rapidocr", "onnxruntime", "diffusers", "lightning")),
    ],
)
def test_importing_is_cheap(module, absent):
    code = f"import sys, {module}; print(*sorted(set({absent!r}) & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_shipped_weights_are_small_and_safe():
    files = [file for file in (PACKAGE / "signboard/weights").rglob("*") if file.is_file()]
    assert any(file.suffix == ".safetensors" for file in files)
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".txt", ".md"}  # what the wheel carries, too
    assert sum(file.stat().st_size for file in files) < 12e6
