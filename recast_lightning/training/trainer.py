"""What module and callbacks ask of a Trainer: a task on its progress bar, and the folder of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L


@runtime_checkable
class ShowsTasks(Protocol):
    """A progress bar that can show a task of its own (as `RecastProgressBar` does)."""

    def task(self, description: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A context whose value advances the task by so many units."""


def progress_of(trainer: L.Trainer, description: str, total: int) -> AbstractContextManager[Callable[[int], Any]]:
    """A task on the Trainer's progress bar; nothing where the bar shows no tasks or is off."""
    bar = trainer.progress_bar_callback
    return bar.task(description, total) if isinstance(bar, ShowsTasks) else nullcontext(lambda _: None)


def run_folder(trainer: L.Trainer) -> Path | None:
    """The folder of the run, or None without a logger. A collective call: every process must make it."""
    folder = trainer.log_dir
    return Path(folder) if trainer.loggers and folder is not None else None
