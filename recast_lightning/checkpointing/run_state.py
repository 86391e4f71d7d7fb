"""What a checkpoint keeps of a run besides Lightning's loops and optimizer, and what the run that goes on must share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recast_lightning.credit import CreditMatrix
from recast_lightning.credit.stages import Stage
from recast_lightning.errors import UserError
from recast_lightning.training.strategies import number_by_module

if TYPE_CHECKING:
    from recast_lightning.training.module import RecastModule

MODEL = ("policy.base_fingerprint", "policy.num_steps", "policy.height", "policy.width", "policy.lora_alpha")
ROLLOUT = (
    "model.seed", "model.timestep_fraction", "data.train", "data.prompts_per_rollout", "data.group_size",
    "trainer.accumulate_grad_batches", "micro_batch_size × processes",
)  # fmt: skip
FREE = (
    "model.beta", "model.kl_weight", "model.advantage_clip", "model.advantage_std", "model.aggregation",
    "model.learning_rate", "model.weight_decay", "model.warmup_steps", "model.ema_decay", "model.old_rate",
    "model.old_flat", "model.old_maximum",
)  # fmt: skip


def dump(module: RecastModule, checkpoint: dict[str, Any]) -> None:
    """Keep W, the counters and the settings in a checkpoint; of the policy there are the adapters only, see `Policy`."""
    number_by_module(checkpoint.get("optimizer_states", []), module)
    checkpoint["recast"] = {
        "synced_rollout": module.synced_rollout,
        "logged_rollout": module.logged_rollout,
        "step_means": module.step_means.state_dict(),
        "credit_stage": module.credit_stage,
        "credit": None if module.credit is None else dict(vars(module.credit)),
        "settings": read_settings(module),
    }


def restore(module: RecastModule, checkpoint: dict[str, Any]) -> str:
    """Restore what `dump` kept; the configuration's values hold where they may differ.

    Returns:
        What was restored, in a sentence.

    Raises:
        UserError: if the checkpoint does not belong to this model, rollout or stage.
    """
    if "recast" not in checkpoint:
        raise UserError("The checkpoint was not written by `recast fit`: give a run's checkpoints/last.ckpt.")
    taken = "state_dict" not in checkpoint  # ModelParallelStrategy has loaded what fits
    weights = (torch.load(str(module.trainer.ckpt_path), weights_only=True) if taken else checkpoint)["state_dict"]
    check_adapters(module, weights)
    state, changes = checkpoint["recast"], []
    fitting, (done, length) = module.trainer.state.fn == "fit", position(checkpoint)
    if fitting:
        changes = check_settings(state["settings"], read_settings(module), within_rollout=done > 0)
        module.trainer.num_sanity_val_steps = 0  # it evaluates the base, and this is no longer the base
    module.synced_rollout, module.logged_rollout = state["synced_rollout"], state["logged_rollout"]
    module.step_means.load_state_dict(state["step_means"])
    module.credit_stage = state["credit_stage"]
    module.credit = None if state["credit"] is None else CreditMatrix(**state["credit"])
    where = f"{state['logged_rollout'] + 1} rollouts done"
    if done:
        where = f"rollout {state['logged_rollout'] + 1}, {done} of {length} items"
    credit = "no W yet"
    if module.credit is not None and module.credit_stage < len(module.stages):
        stage, (rewards, levels) = module.stages[module.credit_stage], module.credit.weights.shape
        if fitting:
            check_credit(module.credit, stage)
        credit = f"W of stage {stage.name!r} ({rewards} rewards × {levels} levels)"
    said = f"{len(weights)} adapter tensors, optimizer step {checkpoint['global_step']}, {where}, {credit}"
    return said + "".join(f"; now {change}" for change in changes)


def check_adapters(module: RecastModule, weights: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint's adapters that fit nowhere.

    Raises:
        UserError: saying how many fit.
    """
    own = {(k, v.shape) for k, v in module.state_dict().items() if ".lora_" in k}
    theirs = {(k, v.shape) for k, v in weights.items()}
    if own != theirs:
        raise UserError(
            f"The checkpoint's adapters do not fit policy {module.policy.path!r} with lora_rank "
            f"{module.policy.lora_rank}: {len(own & theirs)} of {len(own)} weights match by name and shape."
        )


def read_settings(module: RecastModule) -> dict[str, Any]:
    """The settings that a checkpoint keeps."""
    owners = {"model": module, "policy": module.policy, "trainer": module.trainer, "data": module.data}
    settings = {
        "data.train": module.data.sources["train"],
        "micro_batch_size × processes": module.micro_batch_size * module.trainer.world_size,
    }
    for name in (*MODEL, *ROLLOUT, *FREE):
        owner, _, key = name.partition(".")
        settings |= {} if name in settings else {name: getattr(owners[owner], key)}
    return settings


def check_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any], within_rollout: bool) -> list[str]:
    """Compare a checkpoint's settings with those of the run that resumes it.

    Args:
        theirs: of the checkpoint.
        ours: of the run.
        within_rollout: whether the checkpoint was written in the middle of a rollout.

    Returns:
        What differs and may: the run's values hold.

    Raises:
        UserError: naming the first setting that must not differ.
    """
    different = [name for name in ours if theirs.get(name) != ours[name]]
    for name in different:
        values = f"{name} is {theirs.get(name)!r} in the checkpoint and {ours[name]!r} in the configuration"
        if name in MODEL:
            raise UserError(f"{values}: that is another model, so give the checkpoint's value or start a new run.")
        if name in ROLLOUT and within_rollout:
            raise UserError(
                f"{values}, and the checkpoint was written within a rollout, which cannot go on like that: give the "
                "checkpoint's value, or resume from a rollout-<k>.ckpt."
            )
    return [f"{name} {theirs.get(name)!r} → {ours[name]!r}" for name in different]


def check_credit(credit: CreditMatrix, stage: Stage) -> None:
    """Refuse budgets that a W that is in use was not built for.

    Raises:
        UserError: naming stage and budgets.
    """
    if credit.budgets != stage.budgets or credit.method != stage.credit:
        raise UserError(
            f"The checkpoint's W is of {credit.method} credit with budgets {_named(credit.budgets)}, but stage "
            f"{stage.name!r} has {stage.credit} credit with {_named(stage.budgets)}: W is built once a stage, so keep them "
            "until the next one."
        )


def _named(budgets: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {budget:g}" for name, budget in budgets.items())


def position(checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """How many items of its rollout a checkpoint has behind it, and how many those are; (0, 0) between rollouts."""
    states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader") or [{"position": 0, "length": 0}]
    done, length = states[0]["position"], states[0]["length"]
    return (done, length) if 0 < done < length else (0, 0)
