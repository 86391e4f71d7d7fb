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

# The rooms from the ground up: a file imports from its own room and from those before it. docs/design.md is the tour.
ROOMS = (
    "errors", "files", "seeds", "ranges", "paths",
    "flow", "objective", "credit",                                                  # mathematics
    "prompts", "signboard", "policy", "rewards", "proposals",                       # components
    "rollout", "evaluation", "profiling", "report",
    "checkpointing", "training", "callbacks",                                       # Lightning
    "cli", "__main__",
)  # fmt: skip
MATHEMATICS = ROOMS[: ROOMS.index("prompts")]
BELOW_LIGHTNING = ROOMS[: ROOMS.index("checkpointing")]
MOST_LINES = 300


def module_of(file: Path) -> str:
    """Dotted name below the package; the root is `""`."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


FILES = {module_of(file): file for file in [*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").glob("*.py")]}
MODULES = sorted(FILES.keys() - {""})


def room_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def imports_of(module: str) -> frozenset[str]:
    """Full dotted names of all that a module imports anywhere, lazily and for type checkers, too."""
    names: set[str] = set()
    file = FILES[module]
    package = [NAME, *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return frozenset(names)


def roots_of(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(module)}


@cache
def own_imports_of(module: str) -> frozenset[str]:
    """The modules of this package that a module imports."""
    found = set()
    for name in imports_of(module):
        parts = name.split(".")
        if parts[0] == NAME:
            candidates = (".".join(parts[1:end]) for end in range(len(parts), 0, -1))
            found.add(next(c for c in candidates if c in FILES))
    return frozenset(found - {""})


def reached_from(module: str) -> set[str]:
    """The modules that a module imports, directly or not, and itself."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += own_imports_of(current)
    return seen


def test_every_room_is_on_the_list():
    assert {room_of(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    above = {name for name in own_imports_of(module) if ROOMS.index(room_of(name)) > ROOMS.index(room_of(module))}
    assert not above, f"{module} imports {sorted(above)} from above it"


@pytest.mark.parametrize("module", MODULES)
def test_no_import_comes_back(module):
    back = {name for name in own_imports_of(module) if module in reached_from(name)}
    assert not back, f"{module} imports {sorted(back)}, which lead back to it"


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) in MATHEMATICS])
def test_the_method_is_tensor_code_alone(module):
    for reached in reached_from(module):
        forbidden = roots_of(reached) & {*LIGHTNING, "diffusers", "peft", "transformers"}
        assert not forbidden, f"{module} reaches {reached}, which imports {forbidden}"


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) in BELOW_LIGHTNING])
def test_what_lies_below_lightning_does_not_import_it(module):
    assert not roots_of(module) & LIGHTNING


def test_diffusers_and_peft_are_touched_in_one_place():
    users = {room_of(module) for module in MODULES if roots_of(module) & {"diffusers", "peft"}}
    assert users == {"policy", "signboard"}  # Signboard pretrains a policy from nothing


@pytest.mark.parametrize("module", MODULES)
def test_a_file_is_short_enough_to_read(module):
    assert len(FILES[module].read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_imports_are_read_as_meant():
    """The rules above are worth what `imports_of` sees."""
    assert f"{NAME}.callbacks.renyi_profiler.RenyiProfilerCallback" in imports_of("callbacks")
    assert "callbacks.renyi_profiler" in own_imports_of("callbacks")
    assert "seeds" in reached_from("credit.estimate")
    assert any("diffusers" in roots_of(module) for module in MODULES if room_of(module) == "policy")


def test_every_package_is_listed_for_the_wheel():
    tomllib = pytest.importorskip("tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {f"{NAME}.{module}".rstrip(".") for module, file in FILES.items() if file.name == "__init__.py"}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert set(setuptools["packages"]) == packages
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
