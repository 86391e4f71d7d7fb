"""Starting is quick because little is imported; time itself is not asserted."""

import os
import subprocess
import sys
from pathlib import Path

from recast_lightning.cli.entry import PLAIN_COMMANDS, TRAINER_COMMANDS
from recast_lightning.cli.lightning_cli import RecastCLI

ROOT = Path(__file__).parents[2]
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
