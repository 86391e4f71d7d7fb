"""The counters of Lightning's loops that have no public setter, written in one place."""

from __future__ import annotations

import lightning as L


def count_as_rollout_begun(trainer: L.Trainer) -> None:
    """Let a checkpoint saved now say that an epoch has begun and that nothing of it is done.

    Lightning 2.6 resets these counters after `on_train_epoch_start`, or, after a restart, not at all: a checkpoint saved in
    that hook would otherwise be read as one of a rollout that is done, or let the next epoch be counted wrongly.
    """
    epoch = trainer.fit_loop.epoch_progress.current
    epoch.ready = epoch.completed + 1
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.reset_on_run()
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()


def rollout_is_whole(trainer: L.Trainer) -> bool:
    """Whether every item of the rollout at hand has been trained on; `max_steps` can end it before."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.current.ready >= trainer.num_training_batches)
