"""What the parts of a run may know of the Trainer that they run in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

CPU = torch.device("cpu")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]


@dataclass(frozen=True)
class RunContext:
    """Processes, device, precision, progress bar and stop point of a run; the default is one process without any of these.

    Attributes:
        rank: number of this process.
        world_size: number of processes.
        device: where the policy of this process is.
        gather: tensors [...] of all processes as [world_size, ...]; a collective call.
        reduce: sum, mean or maximum of a tensor over all processes; a collective call.
        autocast: a context manager for forwards of the policy.
        progress: from a description and a total to a context whose value advances the progress bar.
        stop_point: raises `Interrupted` where a signal asked the run to stop; a collective call that loses nothing.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor[None]
    reduce: Callable[[Tensor, Literal["sum", "mean", "max"]], Tensor] = lambda tensor, operation: tensor
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    progress: Progress = lambda description, total: nullcontext(lambda units: None)
    stop_point: Callable[[], None] = lambda: None

    def all_agree(self, own: bool) -> bool:
        """Whether the answer of every process is yes; a collective call."""
        yes = torch.tensor(float(own), device=self.device)
        return int(self.reduce(yes, "sum")) == self.world_size
