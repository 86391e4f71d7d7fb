"""Means of what training steps log: over an optimizer step, then over a rollout, and over all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StepMeans:
    """Gathers values without waiting for the device; whole at optimizer steps, where a checkpoint may keep its state."""

    def __init__(self) -> None:
        self._open: dict[str, list[Tensor]] = {}
        self._closed: list[dict[str, float]] = []
        self._skipped = 0

    def add(self, **values: Tensor) -> None:
        """Take the values of one training step, scalars."""
        for name, value in values.items():
            self._open.setdefault(name, []).append(value.detach().float())

    def close(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """End an optimizer step; returns its means, and how many steps of the rollout were skipped so far.

        Args:
            reduce: the mean of a tensor over all processes.
        """
        means = reduce(torch.stack([torch.stack(values).mean() for values in self._open.values()])).tolist()
        self._closed.append(dict(zip(self._open, means, strict=True)))
        self._open = {}
        return {**self._closed[-1], "skipped_steps": float(self._skipped)}

    def skip(self) -> dict[str, float]:
        """End an optimizer step that was not made: its values count for nothing."""
        self._skipped += 1
        self._open = {}
        return {"skipped_steps": float(self._skipped)}

    def rollout(self) -> dict[str, float]:
        """Means over the optimizer steps since `start`, and how many were skipped."""
        names = self._closed[0] if self._closed else ()
        means = {name: sum(step[name] for step in self._closed) / len(self._closed) for name in names}
        return {**means, "skipped_steps": float(self._skipped)}

    def start(self) -> None:
        """Begin a rollout."""
        self._open, self._closed, self._skipped = {}, [], 0

    def state_dict(self) -> dict[str, Any]:
        """The optimizer steps of the rollout so far."""
        return {"steps": self._closed, "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._closed, self._skipped = state["steps"], state["skipped"]
