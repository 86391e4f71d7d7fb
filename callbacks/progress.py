"""A progress bar that knows rollouts, profiles and evaluations, and leaves one line a rollout behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RecastProgressBar(ProgressBar):
    """Bars for sampling, training, profiling and evaluation (on a terminal), and a line for each finished rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._enabled = True

    def disable(self) -> None:
        """Show nothing (Lightning calls this on all ranks but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Show."""
        self._enabled = True

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        if self._enabled:
            (self._progress.console if self._progress else self.console).print(line, soft_wrap=True)

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for work with a known total; its value advances it."""
        task = self._start(description, total)
        try:
            yield lambda units: self._advance(task, units)
        finally:
            self._stop(task)

    def _start(self, description: str, total: int) -> TaskID | None:
        if not self._enabled or not self.console.is_terminal:
            return None
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True
            )
            self._progress.start()
        return self._progress.add_task(description, total=total)

    def _advance(self, task: TaskID | None, units: int = 1) -> None:
        if self._progress is not None and task is not None:
            self._progress.advance(task, units)

    def _stop(self, task: TaskID | None) -> None:
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
            if not self._progress.tasks:
                self._progress.stop()
                self._progress = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Open the training bar with the first item of a rollout."""
        if self._task is None:
            self._task = self._start(
                f"rollout {trainer.current_epoch + 1}: training", int(trainer.num_training_batches)
            )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advance it; after the last item, close it and leave a line with the rollout's mean rewards."""
        self._advance(self._task)
        if batch_idx + 1 < trainer.num_training_batches:
            return
        self._stop(self._task)
        self._task = None
        metrics = pl_module.run_state.metrics
        means = "  ".join(
            f"{name.split('/')[1]} {value:.3f}"
            for name, value in metrics.items()
            if name.endswith("/mean") and "reward/" in name
        )
        stage = pl_module.credit.stage(trainer.current_epoch).name
        self.say(
            f"rollout {trainer.current_epoch + 1}/{trainer.max_epochs}  [bold]{stage}[/bold]  {means}  "
            f"[dim]{metrics['rollout/images_per_second']:.0f} images/s[/dim]"
        )

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Open the evaluation bar."""
        self._evaluation = self._start(
            "evaluating", int(sum(trainer.num_sanity_val_batches or trainer.num_val_batches))
        )

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Advance it."""
        self._advance(self._evaluation)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Close it and print the means."""
        self._stop(self._evaluation)
        values = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/") and k.count("/") == 1}
        what = "base policy" if trainer.sanity_checking else "evaluation"
        self.say(f"[green]{what}[/green]  " + "  ".join(f"{k.removeprefix('val/')} {v:.3f}" for k, v in values.items()))
