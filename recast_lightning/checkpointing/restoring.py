"""Restores a run from a checkpoint that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast_lightning.checkpointing.compatibility import check_adapters, check_credit, check_settings
from recast_lightning.checkpointing.run_state import KEY, RunState
from recast_lightning.errors import UserError
from recast_lightning.policy import Policy


class Restored(NamedTuple):
    """What a checkpoint brought.

    Attributes:
        sentence: for the console; empty if nothing was restored.
        incomparable: whether evaluations before and after cannot be compared.
    """

    sentence: str = ""
    incomparable: bool = False


def restore(
    state: RunState,
    checkpoint: Mapping[str, Any],
    path: str,
    own: Mapping[str, Tensor],
    policy: Policy,
    settings: Mapping[str, Any] | None,
    accept_changes: bool = False,
) -> Restored:
    """Restore a run's counters and W; the configuration's values hold where they may differ.

    Args:
        state: what is restored.
        checkpoint: as Lightning has read it.
        path: of the checkpoint.
        own: state of the module.
        policy: of the module.
        settings: of a run that goes on training; None where nothing is trained.
        accept_changes: whether numbers before and after need not be comparable.

    Raises:
        UserError: if the checkpoint does not belong to this model, rollout or stage.
    """
    if KEY not in checkpoint:
        raise UserError("The checkpoint was not written by `recast fit`: give a run's checkpoints/last.ckpt.")
    taken = "state_dict" not in checkpoint  # ModelParallelStrategy has loaded what fits
    weights = (torch.load(path, weights_only=True) if taken else checkpoint)["state_dict"]
    check_adapters(own, weights, policy)
    changes: list[str] = []
    incomparable = False
    if settings is not None:
        within = position(checkpoint)[0] > 0
        changes, incomparable = check_settings(checkpoint[KEY], settings, within, accept_changes)
    state.load_state_dict(checkpoint[KEY])
    schedule = state.credit
    if settings is not None and schedule.credit is not None and schedule.credit_stage < len(schedule.stages):
        check_credit(schedule.credit, schedule.stages[schedule.credit_stage])
    told = describe(checkpoint, state, len(weights)) + "".join(f"; now {change}" for change in changes)
    return Restored(told + "; the record of evaluations starts anew" * incomparable, incomparable)


def position(checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """How many items of its rollout a checkpoint has behind it, and how many those are; (0, 0) between rollouts."""
    states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader") or [{"position": 0, "length": 0}]
    done, length = states[0]["position"], states[0]["length"]
    return (done, length) if 0 < done < length else (0, 0)


def describe(checkpoint: Mapping[str, Any], state: RunState, num_adapter_tensors: int) -> str:
    """What a checkpoint has brought, in a sentence."""
    done, length = position(checkpoint)
    where = f"{state.logged_rollout + 1} rollouts done"
    if done:
        where = f"rollout {state.logged_rollout + 1}, {done} of {length} items"
    credit = "no W yet"
    schedule = state.credit
    if schedule.credit is not None and schedule.credit_stage < len(schedule.stages):
        rewards, levels = schedule.credit.weights.shape
        stage = schedule.stages[schedule.credit_stage]
        credit = f"W of stage {stage.name!r} ({rewards} rewards × {levels} levels)"
    return f"{num_adapter_tensors} adapter tensors, optimizer step {checkpoint['global_step']}, {where}, {credit}"
