"""What a run counts, and how checkpoints keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recast_lightning.credit import CreditSchedule
from recast_lightning.rollout.step_means import StepMeans

KEY = "recast"  # of a checkpoint
FORMAT = 3  # 1 had flat settings, 2 fewer of them


@dataclass
class RunState:
    """The counters of a run, its W, and its numbers so far.

    Attributes:
        credit: the stages and the W of the current one.
        synced_rollout: the rollout that the old policy was last updated for.
        logged_rollout: the rollout that was logged last; -1 for none.
        step_means: of the training steps of the rollout at hand.
        metrics: the rollout at hand in numbers; not kept, since a resumed rollout is drawn again.
    """

    credit: CreditSchedule
    synced_rollout: int = 0
    logged_rollout: int = -1
    step_means: StepMeans = field(default_factory=StepMeans)
    metrics: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "format": FORMAT,
            "synced_rollout": self.synced_rollout,
            "logged_rollout": self.logged_rollout,
            "step_means": self.step_means.state_dict(),
            **self.credit.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.synced_rollout, self.logged_rollout = state["synced_rollout"], state["logged_rollout"]
        self.step_means.load_state_dict(state["step_means"])
        self.credit.load_state_dict(state)
