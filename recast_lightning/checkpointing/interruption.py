"""SIGTERM, Ctrl-C and SLURM's warning: the run stops at its next safe point, on all processes together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from recast_lightning.errors import Interrupted

Reduce = Callable[[Tensor, Literal["max"]], Tensor]


class Interruption:
    """Takes note of signals; `check` raises where nothing is lost.

    Lightning's own handlers talk to the other processes from within the handler, which deadlocks them when they are in
    the middle of something else, and save wherever the signal found them. These replace them for the time of a fit.
    """

    def __init__(self) -> None:
        self.number = 0
        self.caught = False
        self._before: dict[int, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Interruption:
        return self  # a copy of a module is in the same process; the handlers before ours hold the Trainer

    def catch_slurm(self) -> None:
        """Handle SIGUSR1 in a SLURM job: Lightning leaves alone what is handled already."""
        if "SLURM_JOB_ID" in os.environ:
            self._catch(signal.SIGUSR1)

    def catch(self) -> None:
        """Handle SIGTERM and SIGINT, too: Lightning has set its own handlers by now."""
        self.catch_slurm()
        self._catch(signal.SIGTERM, signal.SIGINT)

    def _catch(self, *numbers: int) -> None:
        self.caught = True
        for number in numbers:
            if signal.getsignal(number) != self._note:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._note)

    def release(self) -> None:
        """Put back what was there."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == self.number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for a safe point
        self.number = number

    def check(self, reduce: Reduce, device: torch.device) -> None:
        """A safe point. A collective call: a signal that one process got stops them all at the same place.

        Args:
            reduce: the maximum of a tensor over all processes.
            device: where tensors are reduced.

        Raises:
            Interrupted: if there was a signal.
        """
        if self.caught and (number := int(reduce(torch.tensor(self.number, device=device), "max"))):
            raise Interrupted(number)


def requeue() -> str:
    """Ask SLURM to start this job again; returns what came of it."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol could not requeue job {job}: {error}"
    return f"requeued job {job}" if done.returncode == 0 else f"job {job} was not requeued: {done.stderr.strip()}"
