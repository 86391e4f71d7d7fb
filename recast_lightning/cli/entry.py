"""The commands of `recast`, and which module runs each."""

from __future__ import annotations

import gc
import os
import sys
from argparse import HelpFormatter
from collections.abc import Sequence
from importlib import import_module

from recast_lightning.cli.exits import configuring, fail, importing, interruptible, speak_plainly

TRAINER_COMMANDS = {
    "fit": "train: a profile before each stage, then its rollouts",
    "validate": "draw and score the evaluation prompts",
    "test": "the same, logged as test/<reward>",
    "predict": "draw pictures of prompts",
    "profile": "measure when in denoising each reward can tell good from bad, and train nothing",
    "doctor": "check every part of a configuration before a long run",
}
PLAIN_COMMANDS = {  # each is a module of this folder
    "weights": "build W from a saved profile for any budgets, or compare two profiles",
    "report": "rebuild the report of a run",
    "prompts": "write a set of training prompts",
    "signboard": "train the embedded models",
}
USAGE = "usage: recast COMMAND [options]\n       recast COMMAND --help"


def help_text() -> str:
    """What `recast --help` prints; nothing is imported for it."""

    def listed(commands: dict[str, str]) -> str:
        return "\n".join(f"  {name:<10} {line}" for name, line in commands.items())

    return (
        f"{USAGE}\n\nMulti-reward fine-tuning of text-to-image policies, with measured credit in time.\n\n"
        f"With a configuration (-c FILE, which may come more than once; --data.group_size 12 and the like win over it):\n"
        f"{listed(TRAINER_COMMANDS)}\n\nWithout:\n{listed(PLAIN_COMMANDS)}\n\n"
        "Example: recast fit -c configs/signboard/demo.yaml"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run `recast` with the given arguments (default: the process's)."""
    speak_plainly()
    with interruptible():
        _run(list(sys.argv[1:] if args is None else args), args)


def _run(arguments: list[str], given: Sequence[str] | None) -> None:
    """Find the command and run it."""
    command = arguments[0] if arguments else None
    if command in ("-h", "--help"):
        print(help_text())
        sys.exit(0)
    if command in PLAIN_COMMANDS:
        _run_plain(command, arguments[1:])
        return
    if command not in TRAINER_COMMANDS:
        known = ", ".join((*TRAINER_COMMANDS, *PLAIN_COMMANDS))
        fail(
            f"{'there is no command' if command is None else f'unknown command {command!r}'}: expected one of {known}."
        )
    from recast_lightning.cli.config_files import check_config_files, check_options

    with configuring():
        check_options(arguments)
        check_config_files(arguments)
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls what is deprecated
    gc.disable()  # modules stay: looking for garbage among them takes seconds now, and some of every rollout later
    with importing():
        from recast_lightning.cli.lightning_cli import run

    gc.freeze()
    gc.enable()
    run(None if given is None else arguments)


def _run_plain(command: str, arguments: list[str]) -> None:
    """A command that needs no Trainer."""
    with importing():
        from recast_lightning.cli.parser import SentenceParser
        from recast_lightning.paths import expand_home

        module = import_module(f"recast_lightning.cli.{command}")
    parser = SentenceParser(prog=f"recast {command}", allow_abbrev=False, formatter_class=HelpFormatter)
    module.add_arguments(parser)
    with configuring():
        module.run(expand_home(parser.parse_args(arguments)))
