"""`recast signboard pretrain`: trains the embedded models."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    from recast_lightning.signboard.pretrain import pretrain

    options = type(parser)(description="Train Signboard's models from nothing.")
    options.add_function_arguments(pretrain, as_group=False)
    parser.add_subcommands(required=True, dest="what").add_subcommand("pretrain", options)


def run(options: Namespace) -> None:
    """Train."""
    from recast_lightning.signboard.pretrain import pretrain

    pretrain(**options.pretrain.as_dict())
