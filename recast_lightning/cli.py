"""The command line: Lightning's subcommands on RecastModule and PromptDataModule, and plain ones that need no Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


def report(run: Path) -> None:
    """Rebuild report.html of a run from what its folder holds.

    Args:
        run: the run's folder.
    """
    from recast_lightning.report import write_report

    print(write_report(run))


def plain_commands() -> dict[str, Any]:
    """Subcommands that need no Trainer."""
    from recast_lightning.signboard.pretrain import pretrain

    return {"report": report, "signboard": {"pretrain": pretrain}}


PLAIN = ("report", "signboard")
EPILOG = (
    "Also: recast weights PROFILE (build W from a saved profile), recast report RUN (rebuild a run's report), "
    "recast signboard pretrain (train the embedded models), recast prompts (write a set of training prompts)."
)


def fail(message: str) -> NoReturn:
    """Leave with one sentence and exit code 2."""
    print(f"recast: error: {_first_cause(message)}", file=sys.stderr)
    sys.exit(2)


def _first_cause(message: str) -> str:
    """The sentence that matters, of a message that lists why each of several types does not fit."""
    causes = [line[4:] for line in message.splitlines() if line.startswith("  - ")]
    return causes[0] if message.startswith("Does not validate against any of the Union") and causes else message


def _checked(action: Callable[[], Any]) -> Any:
    """Run what checks the user's configuration; what it raises is for the user."""
    try:
        return action()
    except (ValueError, FileNotFoundError) as error:
        fail(str(error))


def main(args: Sequence[str] | None = None) -> None:
    """Run `recast` with the given arguments (default: the process's)."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and arguments[0] == "weights":
        from recast_lightning import weights

        weights.main(arguments[1:])
        return
    if arguments and arguments[0] == "prompts":
        from recast_lightning import prompt_sets

        prompt_sets.main(arguments[1:])
        return
    if arguments and arguments[0] in PLAIN:
        from jsonargparse import auto_cli

        command = plain_commands()[arguments[0]]
        _checked(lambda: auto_cli(command, args=arguments[1:], prog=f"recast {arguments[0]}"))
        return
    os.environ.setdefault("WANDB_SILENT", "true")
    from recast_lightning.lightning_cli import RecastCLI

    RecastCLI.run(None if args is None else arguments)


if __name__ == "__main__":
    main()
