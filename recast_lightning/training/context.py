"""From a Trainer to the context that the parts of a run see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import lightning as L
from torch import Tensor

from recast_lightning.checkpointing.interruption import Interruption
from recast_lightning.rollout.context import RunContext
from recast_lightning.training.trainer import progress_of


def context_of(module: L.LightningModule, interruption: Interruption) -> RunContext:
    """The context of a run whose strategy is set up.

    Args:
        module: attached to a Trainer.
        interruption: may stop the run at its stop points.
    """
    trainer = module.trainer
    device = trainer.strategy.root_device

    def gather(tensor: Tensor) -> Tensor:
        gathered: Any = module.all_gather(tensor)
        return gathered.reshape(trainer.world_size, *tensor.shape)

    def reduce(tensor: Tensor, operation: Literal["sum", "mean", "max"]) -> Tensor:
        reduced: Any = trainer.strategy.reduce(tensor, reduce_op=operation)
        return reduced

    def autocast() -> AbstractContextManager[Any]:
        return trainer.precision_plugin.forward_context()

    def progress(description: str, total: int) -> AbstractContextManager[Callable[[int], Any]]:
        return progress_of(trainer, description, total)

    def stop_point() -> None:
        interruption.check(reduce, device)

    return RunContext(trainer.global_rank, trainer.world_size, device, gather, reduce, autocast, progress, stop_point)
