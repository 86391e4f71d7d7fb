"""AdamW with its state there from the start, a linear warm-up, and whose settings hold after a resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import nn


def started_adamw(parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with zero moments at step 0, which is what it would make at its first step.

    Where a sharded optimizer's state is saved before that, torch makes one up by a step without gradients, which counts.
    """
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def warm_up(step: int, steps: int) -> float:
    """Share of the learning rate at an optimizer step, of a linear rise over so many steps."""
    return min(1.0, (step + 1) / steps) if steps else 1.0


def with_warm_up(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """An optimizer and its linear warm-up, as Lightning's `configure_optimizers` returns them."""
    if not steps:
        return optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up(step, steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def set_rates(trainer: L.Trainer, learning_rate: float, weight_decay: float, warmup_steps: int) -> None:
    """Make the optimizers that a checkpoint has restored use the configuration's values instead of the checkpoint's."""
    scale = warm_up(trainer.global_step, warmup_steps)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group |= {"lr": learning_rate * scale, "weight_decay": weight_decay}
            group |= {"initial_lr": learning_rate} if "initial_lr" in group else {}
    for config in trainer.lr_scheduler_configs:
        config.scheduler.base_lrs = [learning_rate]
