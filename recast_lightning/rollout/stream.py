"""A loader that serves rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recast_lightning.rollout.items import TrainItems
from recast_lightning.rollout.samples import RolloutBuffer, TrainItem


class RolloutStream:
    """A loader whose every pass is one rollout, drawn when the first item is asked for.

    Its state is only a position: after a stop in the middle, the rollout is drawn again from its counters.

    Args:
        current: the number of the rollout at hand, from 0.
        collect: draws and scores a rollout.
        items: cuts a rollout into items.
        num_samples: samples of a rollout on this process.
    """

    def __init__(
        self,
        current: Callable[[], int],
        collect: Callable[[int], RolloutBuffer],
        items: TrainItems,
        num_samples: int,
    ) -> None:
        self.current, self.collect, self.items = current, collect, items
        self.length, self.position, self.resuming = items.count(num_samples), 0, False

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TrainItem]:
        if not self.resuming:
            self.position = 0
        self.resuming = False
        return self._rest()

    def _rest(self) -> Iterator[TrainItem]:
        rollout = self.current()
        buffer = self.collect(rollout)
        while self.position < self.length:
            self.position += 1
            yield self.items.item(buffer, rollout, self.position - 1)

    def state_dict(self) -> dict[str, int]:
        """The position, and of how many."""
        return {"position": self.position, "length": self.length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position."""
        self.position = state["position"]
        self.resuming = self.position < self.length
