"""A loader that serves rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recast_lightning.rollout.samples import TrainItem


class RolloutStream:
    """A loader whose every pass is one rollout, drawn lazily when the first item is asked for.

    Its state is only a position: after a stop in the middle, the rollout is drawn again from its counters.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.position, self.resuming = module, 0, False

    def __len__(self) -> int:
        return int(self.module.items_per_rollout)

    def __iter__(self) -> Iterator[TrainItem]:
        if not self.resuming:
            self.position = 0
        self.resuming = False
        return self._items()

    def _items(self) -> Iterator[TrainItem]:
        rollout = self.module.current_epoch
        buffer = self.module.collect(rollout)
        while self.position < len(self):
            self.position += 1
            yield self.module.train_item(buffer, rollout, self.position - 1)

    def state_dict(self) -> dict[str, int]:
        """The position, and of how many."""
        return {"position": self.position, "length": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position."""
        self.position = state["position"]
        self.resuming = self.position < len(self)
