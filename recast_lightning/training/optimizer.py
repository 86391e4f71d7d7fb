"""AdamW with its state there from the start, a linear warm-up, and whose settings hold after a resume."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn

from recast_lightning.ranges import check_ranges


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and the linear rise of its learning rate.

    Args:
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        warmup_steps: optimizer steps over which the learning rate rises to its value; AdamW's first steps are mostly noise.
    """

    learning_rate: float = 3e-4
    weight_decay: float = 1e-4
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_ranges(vars(self), {"learning_rate": "(0, inf)", "weight_decay": "[0, inf)", "warmup_steps": "[0, inf)"})

    def share(self, step: int) -> float:
        """Share of the learning rate at an optimizer step."""
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0

    def build(self, parameters: Iterable[nn.Parameter]) -> Any:
        """AdamW and its warm-up, as Lightning's `configure_optimizers` returns them.

        The moments are zeros from the start, as AdamW would make them at its first step: where a sharded optimizer's state
        is saved before that, torch makes one up by a step without gradients, which counts.
        """
        optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
        if not self.warmup_steps:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.share(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def apply_to(self, trainer: L.Trainer) -> None:
        """Make the optimizers that a checkpoint has restored use these values instead of the checkpoint's."""
        scale = self.share(trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group |= {"lr": self.learning_rate * scale, "weight_decay": self.weight_decay}
                group |= {"initial_lr": self.learning_rate} if "initial_lr" in group else {}
        for config in trainer.lr_scheduler_configs:
            config.scheduler.base_lrs = [self.learning_rate]
