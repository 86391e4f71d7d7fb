"""Starting is quick because little is imported; time itself is not asserted."""

import os
import subprocess
import sys
from pathlib import Path

from integration.tiny import config

from recast_lightning.cli import PLAIN_COMMANDS, TRAINER_COMMANDS
from recast_lightning.lightning_cli import RecastCLI

ROOT = Path(__file__).parents[1]
_CODE = """
import sys
from recast_lightning.cli import main
try:
    main(sys.argv[1:])
finally:
    print("\\n".join(sys.modules), file=open({file!r}, "w"))
"""


def imported(folder: Path, *arguments: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """The modules that a command had imported in the end, and what it said."""
    file = folder / "modules.txt"
    command = [sys.executable, "-c", _CODE.format(file=str(file)), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return set(file.read_text().split()), done


def test_help_imports_nothing_and_lists_every_command(tmp_path):
    modules, done = imported(tmp_path, "--help")
    assert done.returncode == 0
    assert not modules & {"torch", "numpy", "lightning", "jsonargparse", "yaml", "rich", "matplotlib"}
    assert "usage: recast" in done.stdout
    for name, line in {**TRAINER_COMMANDS, **PLAIN_COMMANDS}.items():
        assert f"\n  {name:<10} {line}\n" in done.stdout


def test_the_listed_commands_are_those_of_the_trainer():
    assert set(TRAINER_COMMANDS) == set(RecastCLI.subcommands())


def test_a_malformed_file_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {beta: 1, beta: 2}\n")
    modules, done = imported(tmp_path, "fit", "-c", str(tmp_path / "a.yaml"))
    assert done.returncode == 2, done.stderr
    assert not modules & {"torch", "numpy", "lightning", "jsonargparse"}


def test_a_refused_configuration_imports_no_model_library(tmp_path):
    file = config(tmp_path, trainer__accumulate_grad_batches=4)  # refused by the last of all checks
    modules, done = imported(tmp_path, "fit", "-c", str(file))
    assert done.returncode == 2, done.stderr
    assert "does not divide" in done.stderr
    heavy = {"transformers", "diffusers", "peft", "wandb", "onnxruntime", "rapidocr", "scipy.signal", "scipy.optimize",
             "scipy.stats", "scipy.ndimage", "pandas", "torchvision"}  # fmt: skip
    assert "torchmetrics" in modules
    assert not modules & heavy
    left_out = "from recast_lightning.startup import quick_imports\nwith quick_imports():\n    import lightning\n"
    after = (
        left_out + "from torchmetrics.utilities.imports import _TRANSFORMERS_GREATER_EQUAL_4_4 as there; assert there"
    )
    subprocess.run([sys.executable, "-c", after], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
