"""The stages of a run and the W of the current one: which reward counts how much, at which level, in which rollout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit.matrix import CreditMatrix
from recast_lightning.credit.stages import Stage, check_stages, stage_index


class CreditSchedule:
    """Goes through stages, each with a W of its own.

    Args:
        stages: what is trained on, in order.
        rewards: names of the rewards that there are.

    Attributes:
        credit: W that was built last; None before the first.
        credit_stage: index of the stage that it is for; -1 before the first.

    Raises:
        ValueError: if stages cannot be trained.
    """

    def __init__(self, stages: Sequence[Stage], rewards: Collection[str]) -> None:
        check_stages(stages, rewards)
        self.stages = list(stages)
        self.credit: CreditMatrix | None = None
        self.credit_stage = -1

    def stage_index(self, rollout: int) -> int:
        """Index of the stage that a rollout, counted from 0, belongs to."""
        return stage_index(self.stages, rollout)

    def stage(self, rollout: int) -> Stage:
        """The stage that a rollout belongs to."""
        return self.stages[self.stage_index(rollout)]

    def set(self, credit: CreditMatrix, rollout: int, num_levels: int) -> None:
        """Use W for the stage of a rollout.

        Raises:
            ValueError: if W is for other rewards or another number of levels.
        """
        stage = self.stage(rollout)
        if credit.rewards != list(stage.budgets) or credit.weights.shape[1] != num_levels:
            raise ValueError(
                f"W is for {', '.join(credit.rewards)} at {credit.weights.shape[1]} levels, but stage {stage.name!r} "
                f"trains {', '.join(stage.budgets)} at {num_levels}."
            )
        self.credit, self.credit_stage = credit, self.stage_index(rollout)

    def current(self, rollout: int, sigmas: Tensor) -> CreditMatrix:
        """W of the stage of a rollout; a static one is built here, since it needs no profile.

        Args:
            rollout: counted from 0.
            sigmas: the sampler's levels, ascending, [T + 1].

        Raises:
            RuntimeError: if the stage is measured and has no W yet.
        """
        if self.credit is None or self.credit_stage != self.stage_index(rollout):
            stage, num_levels = self.stage(rollout), len(sigmas) - 1
            if stage.credit != "static":
                raise RuntimeError(
                    f"Stage {stage.name!r} has no W yet: add RenyiProfilerCallback to trainer.callbacks."
                )
            flat = CreditMatrix.from_gains(
                torch.ones(len(stage.budgets), num_levels), stage.budgets, "static", sigmas=sigmas
            )
            self.set(flat, rollout, num_levels)
            return flat
        return self.credit

    def state_dict(self) -> dict[str, Any]:
        """W and the stage that it is for."""
        return {"credit_stage": self.credit_stage, "credit": None if self.credit is None else dict(vars(self.credit))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.credit_stage = state["credit_stage"]
        self.credit = None if state["credit"] is None else CreditMatrix(**state["credit"])
