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

    def add(self, **values: Tensor) -> None:
        """Take the values of one training step, scalars."""
        for name, value in values.items():
            self._open.setdefault(name, []).append(value.detach().float())

    def close(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """End an optimizer step; returns its means.

        Args:
            reduce: the mean of a tensor over all processes.
        """
        means = reduce(torch.stack([torch.stack(values).mean() for values in self._open.values()])).tolist()
        self._closed.append(dict(zip(self._open, means, strict=True)))
        self._open = {}
        return self._closed[-1]

    def rollout(self) -> dict[str, float]:
        """Means over the optimizer steps since `start`."""
        names = self._closed[0] if self._closed else ()
        return {name: sum(step[name] for step in self._closed) / len(self._closed) for name in names}

    def start(self) -> None:
        """Begin a rollout."""
        self._open, self._closed = {}, []

    def state_dict(self) -> dict[str, Any]:
        """The optimizer steps of the rollout so far."""
        return {"steps": self._closed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._closed = state["steps"]
