"""The stages of a run and the W of the current one: what RecastModule trains on, and with which weight at which level."""

from __future__ import annotations

import torch

from recast_lightning.credit import CreditMatrix
from recast_lightning.credit.stages import Stage, check_stages, stage_index
from recast_lightning.evaluation.evaluating import EvaluatingModule
from recast_lightning.policy import Policy
from recast_lightning.rewards import RewardModel
from recast_lightning.rollout.finite import OnNonfinite


class StagedModule(EvaluatingModule):
    """An evaluating module that goes through stages, each with a W of its own.

    Args:
        policy: of `SamplingModule`, as are all but one.
        rewards: name → reward model.
        stages: what is trained on, in order.
        num_workers: of the scoring.
        reward_device: of the scoring, as the next one.
        reward_offload: of the scoring.
        on_nonfinite: of `FiniteCheck`.
    """

    def __init__(
        self,
        policy: Policy,
        rewards: dict[str, RewardModel],
        stages: list[Stage],
        num_workers: int,
        reward_device: str | list[str] | None,
        reward_offload: bool,
        on_nonfinite: OnNonfinite,
    ) -> None:
        super().__init__(policy, rewards, num_workers, reward_device, reward_offload, on_nonfinite)
        check_stages(stages, rewards)
        self.stages = stages
        self.credit: CreditMatrix | None = None
        self.credit_stage = -1

    @property
    def stage_index(self) -> int:
        """Index of the stage of the current rollout."""
        return stage_index(self.stages, self.current_epoch)

    @property
    def stage(self) -> Stage:
        """The stage of the current rollout."""
        return self.stages[self.stage_index]

    def set_credit(self, credit: CreditMatrix) -> None:
        """Use W for the current stage."""
        if credit.rewards != list(self.stage.budgets) or credit.weights.shape[1] != self.policy.num_steps:
            raise ValueError(
                f"W is for {', '.join(credit.rewards)} at {credit.weights.shape[1]} levels, but stage {self.stage.name!r} "
                f"trains {', '.join(self.stage.budgets)} at {self.policy.num_steps}."
            )
        self.credit, self.credit_stage = credit, self.stage_index

    def current_credit(self) -> CreditMatrix:
        """W of the current stage; a static one needs no profile."""
        if self.credit_stage != self.stage_index:
            if self.stage.credit != "static":
                raise RuntimeError(
                    f"Stage {self.stage.name!r} has no W yet: add RenyiProfilerCallback to trainer.callbacks."
                )
            flat = torch.ones(len(self.stage.budgets), self.policy.num_steps)
            self.set_credit(CreditMatrix.from_gains(flat, self.stage.budgets, "static", sigmas=self.policy.sigmas))
        assert self.credit is not None
        return self.credit
