"""The schedule by which the old policy, which samples, follows the trained one."""

from dataclasses import dataclass

from recast_lightning.ranges import check_ranges


@dataclass(frozen=True)
class OldPolicySchedule:
    """θ_old ← η θ_old + (1 − η) θ before each rollout, with η = min(rate · max(step − flat, 0), maximum).

    Args:
        rate: growth of η per rollout.
        flat: rollouts during which η is 0 (the old policy is the trained one).
        maximum: largest η.
    """

    rate: float = 0.001
    flat: int = 0
    maximum: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(vars(self), {"rate": "[0, inf)", "flat": "[0, inf)", "maximum": "[0, 1)"}, "old_policy")

    def decay(self, step: int) -> float:
        """η after so many rollouts."""
        return min(self.rate * max(step - self.flat, 0), self.maximum)
