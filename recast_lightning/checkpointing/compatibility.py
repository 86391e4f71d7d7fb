"""Does a checkpoint belong to the configured policy? Asked before any model is loaded."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from recast_lightning.policy import Policy
from recast_lightning.policy.pipeline_folder import PipelineFolder

_PREFIX = "policy.transformer."


def check_checkpoint(path: str, policy: Policy, *, training: bool) -> None:
    """Read a checkpoint and compare it with the policy's options; pictures may be drawn at other steps than in training.

    Raises:
        ValueError: if it cannot be read, is none of ours, or is of another policy; naming what differs.
    """
    state = _read(path)
    rank = next((len(w) for k, w in state["state_dict"].items() if ".lora_A." in k), None)
    if rank is not None and rank != policy.lora_rank:
        raise ValueError(f"{path} has adapters of rank {rank}, but lora_rank is {policy.lora_rank}.")
    levels = (state["recast"]["credit"] or {}).get("weights")
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
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is cut off, or something else ({type(error).__name__})."
        ) from error
    if not isinstance(state, dict) or not {"recast", "state_dict"} <= state.keys():
        raise ValueError(f"{path} is no checkpoint of this project: give a run's checkpoints/last.ckpt.")
    return state
