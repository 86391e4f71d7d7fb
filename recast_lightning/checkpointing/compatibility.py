"""Does a checkpoint belong to the configured run? Its policy is compared before any model is loaded, the rest on loading."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recast_lightning.checkpointing.renamed import RENAMED
from recast_lightning.checkpointing.run_state import FORMAT, KEY
from recast_lightning.checkpointing.settings import COMPARED, EVALUATION, MODEL, WITHIN_ROLLOUT, belongs_to
from recast_lightning.credit import CreditMatrix
from recast_lightning.credit.stages import Stage
from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.policy.pipeline_folder import PipelineFolder

_PREFIX = "policy.transformer."
_ABSENT = "absent"


def check_checkpoint(path: str, policy: Policy, *, training: bool) -> None:
    """Read a checkpoint and compare it with the policy's options; pictures may be drawn at other steps than in training.

    Raises:
        ValueError: if it cannot be read, is none of ours, or is of another policy; naming what differs.
    """
    state = _read(path)
    rank = next((len(w) for k, w in state["state_dict"].items() if ".lora_A." in k), None)
    if rank is not None and rank != policy.lora_rank:
        raise ValueError(f"{path} has adapters of rank {rank}, but lora_rank is {policy.lora_rank}.")
    levels = (state[KEY]["credit"] or {}).get("weights")
    if training and levels is not None and levels.shape[1] != policy.num_steps:
        raise ValueError(f"{path} was trained at {levels.shape[1]} levels, but num_steps is {policy.num_steps}.")
    shapes = {k.partition(".lora_A.")[0]: w.shape[1] for k, w in state["state_dict"].items() if ".lora_A." in k}
    adapted = {key.removeprefix(_PREFIX): size for key, size in shapes.items()}
    targets = policy.lora_targets  # none, for a hub id that is not in the cache yet
    for target in targets:
        if not any(module.endswith(target) for module in adapted):
            raise ValueError(f"{path} has no adapters on {target!r}, which lora_targets asks for.")
    for module in adapted:
        if targets and not module.endswith(targets):
            raise ValueError(f"{path} has adapters on {module!r}, which lora_targets does not name.")
    pipeline = PipelineFolder.find(policy.path)
    base = pipeline.weight_shapes() if pipeline else {}
    for module, size in adapted.items():
        if base and (f"{module}.weight" not in base or base[f"{module}.weight"][1] != size):
            raise ValueError(
                f"{path} is of another base than {policy.path!r}: {module!r} is absent or of another size."
            )


def _read(path: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is no checkpoint at all
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a text file can be read as any instruction of a pickle
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is cut off, or something else ({type(error).__name__})."
        ) from error
    if not isinstance(state, dict) or not {KEY, "state_dict"} <= state.keys():
        raise ValueError(f"{path} is no checkpoint of this project: give a run's checkpoints/last.ckpt.")
    return state


def check_adapters(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], policy: Policy) -> None:
    """Refuse a checkpoint's adapters that fit nowhere.

    Args:
        own: state of the module.
        theirs: state in the checkpoint.
        policy: for the sentence.

    Raises:
        UserError: saying how many fit.
    """
    ours = {(k, v.shape) for k, v in own.items() if ".lora_" in k}
    given = {(k, v.shape) for k, v in theirs.items()}
    if ours != given:
        raise UserError(
            f"The checkpoint's adapters do not fit policy {policy.path!r} with lora_rank {policy.lora_rank}: "
            f"{len(ours & given)} of {len(ours)} weights match by name and shape."
        )


def check_settings(
    state: Mapping[str, Any], ours: Mapping[str, Any], within_rollout: bool, accept_changes: bool = False
) -> tuple[list[str], bool]:
    """Compare a checkpoint's settings with those of the run that resumes it.

    Args:
        state: what the checkpoint keeps.
        ours: settings of the run.
        within_rollout: whether the checkpoint was written in the middle of a rollout.
        accept_changes: whether numbers before and after need not be comparable.

    Returns:
        What differs and may: the run's values hold. Then whether evaluations before and after cannot be compared.

    Raises:
        UserError: naming the first setting that must not differ, or a format from a later version.
    """
    form = state.get("format", 1)
    if form > FORMAT:
        raise UserError(
            f"The checkpoint has format {form}, and this version of recast_lightning reads up to {FORMAT}: "
            "install the version that wrote it, or a later one."
        )
    theirs = {RENAMED.get(name, name): value for name, value in state["settings"].items()}
    names = [*ours, *(theirs.keys() - ours.keys())] if form == FORMAT else [name for name in ours if name in theirs]
    changes, incomparable = [], False
    for name in names:
        before, now = (settings.get(name, _ABSENT) for settings in (theirs, ours))
        if before == now:
            continue
        values = f"{name} is {before!r} in the checkpoint and {now!r} in the configuration"
        if belongs_to(name, MODEL):
            raise UserError(f"{values}: that is another model, so give the checkpoint's value or start a new run.")
        if belongs_to(name, COMPARED) and not accept_changes:
            raise UserError(
                f"{values}, so numbers before and after could not be compared: give the checkpoint's value, or add "
                "--accept-changes, which starts the record of evaluations anew."
            )
        if belongs_to(name, WITHIN_ROLLOUT) and within_rollout:
            raise UserError(
                f"{values}, and the checkpoint was written within a rollout, which cannot go on like that: give the "
                "checkpoint's value, or resume from a rollout-<k>.ckpt."
            )
        incomparable |= belongs_to(name, EVALUATION)
        changes.append(f"{name} {before!r} → {now!r}")
    return changes, incomparable


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
