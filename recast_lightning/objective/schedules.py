"""How the two adapters that are not trained follow the trained one: schedules of DiffusionNFT's published loop."""

from dataclasses import dataclass
from typing import Literal

from recast_lightning.ranges import check_ranges


@dataclass(frozen=True)
class OldPolicySchedule:
    """θ_old ← η θ_old + (1 − η) θ before each rollout, with η = min(rate · max(n − flat, 0), maximum).

    Args:
        rate: growth of η per unit of n.
        flat: n up to which η is 0 (the old policy is the trained one).
        maximum: largest η.
        count: what n counts: optimizer `steps`, as published, or `rollouts`.
    """

    rate: float = 0.001
    flat: int = 0
    maximum: float = 0.5
    count: Literal["steps", "rollouts"] = "steps"

    def __post_init__(self) -> None:
        check_ranges(vars(self), {"rate": "[0, inf)", "flat": "[0, inf)", "maximum": "[0, 1)"}, "old_policy")
        if self.count not in ("steps", "rollouts"):
            raise ValueError(f"old_policy.count must be 'steps' or 'rollouts', got {self.count!r}.")

    def decay(self, *, steps: int, rollouts: int) -> float:
        """η after so many optimizer steps, which are so many rollouts."""
        n = steps if self.count == "steps" else rollouts
        return min(self.rate * max(n - self.flat, 0), self.maximum)


def ema_decay(step: int, largest: float) -> float:
    """The decay d of θ_ema ← d θ_ema + (1 − d) θ after an optimizer step: d = min((1 + step) / (10 + step), largest).

    Steps count from 1. It is 0.18 after the first step, 0.55 after the tenth, and 0.9 from the 80th on: the average soon
    forgets the base.
    """
    return min((1 + step) / (10 + step), largest)
