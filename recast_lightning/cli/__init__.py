"""The command line, `recast`."""

from recast_lightning.cli.entry import main

__all__ = ["main"]
