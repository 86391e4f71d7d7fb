"""All that shapes the numbers of a run, for checkpoints and for the record of its evaluations."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from recast_lightning.checkpointing.settings import describe, read_settings, versions


@runtime_checkable
class ShapesNumbers(Protocol):
    """A callback that shapes a run's numbers."""

    def settings(self) -> dict[str, Any]:
        """Section → settings."""


def settings_of(module: Any) -> dict[str, Any]:
    """Settings by the configuration's names, of a `RecastModule` with a Trainer and a policy that is loaded."""
    trainer, data, policy = module.trainer, module.data, module.policy
    derived = {
        "rewards": {name: describe(reward) for name, reward in module.rewards.items()},
        "stages": {stage.name: describe(stage) for stage in module.credit.stages},
        "training prompts": data.contents["train"],
        "evaluation prompts": data.contents["validation"],
        "data.train": data.sources["train"],
        "data.validation": data.sources["validation"],
        "model.on_nonfinite": module.finite.action,
        "model.scoring.failure_share": module.scoring_options.failure_share,
        "policy.max_sequence_length": policy.family.max_sequence_length,
        "policy.guidance": policy.family.guidance,
        "micro_batch_size × processes": module.rollout.micro_batch_size * trainer.world_size,
        "versions": versions(),
    }
    for callback in trainer.callbacks:
        derived |= callback.settings() if isinstance(callback, ShapesNumbers) else {}
    return read_settings({"model": module, "policy": policy, "trainer": trainer, "data": data}, derived)
