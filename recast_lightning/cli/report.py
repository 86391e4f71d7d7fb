"""`recast report`: rebuilds the report of a run."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = "Rebuild report.html of a run from what its folder holds."
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")


def run(options: Namespace) -> None:
    """Print the path of the report."""
    from recast_lightning.report import write_report

    print(write_report(options.run))
