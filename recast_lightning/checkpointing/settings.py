"""What shapes a run's numbers, as flat settings that checkpoints and evaluation records keep and a resume compares.

Names are the configuration's, e.g. `policy.solver` or `rewards.clip.model`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from importlib.metadata import version
from typing import Any

from recast_lightning.files import content_hash
from recast_lightning.prompts import Prompt

MODEL = ("policy.base_fingerprint", "policy.num_steps", "policy.height", "policy.width", "policy.lora_alpha")
_DRAWING = ("policy.solver", "policy.max_sequence_length", "policy.guidance", "policy.use_t5", "rewards")
EVALUATION = (*_DRAWING, "evaluation prompts")
COMPARED = (*EVALUATION, "training prompts")
WITHIN_ROLLOUT = (
    "model.seed", "model.rollout.timestep_fraction", "data.prompts_per_rollout", "data.group_size",
    "trainer.accumulate_grad_batches", "micro_batch_size × processes", "training prompts", *_DRAWING,
)  # fmt: skip
FREE = (
    "model.objective.beta", "model.objective.kl_weight", "model.objective.advantage_clip",
    "model.advantages.std", "model.advantages.aggregation", "model.optimizer.learning_rate",
    "model.optimizer.weight_decay", "model.optimizer.warmup_steps", "model.ema_decay", "model.ema_warmup",
    "model.old_policy.rate", "model.old_policy.flat", "model.old_policy.maximum", "model.old_policy.count",
    "policy.dtype", "policy.vae_dtype",
    "policy.compile_blocks", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm", "trainer.precision",
)  # fmt: skip
PACKAGES = ("recast-lightning", "torch", "diffusers", "transformers", "peft")
_SPEED = (
    "batch_size", "concurrency", "threads", "timeout", "retries", "backoff", "url", "base_url", "health_path",
    "api_key_env", "self",
)  # fmt: skip


def belongs_to(name: str, group: Sequence[str]) -> bool:
    """Whether a setting is in a group, which names settings or what they begin with."""
    return any(f"{name}.".startswith(f"{part}.") for part in group)


def read_settings(owners: Mapping[str, Any], derived: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run.

    Args:
        owners: first part of a setting's name → the object whose attributes the other parts are.
        derived: settings that are no attribute; nested ones get dotted names.
    """
    found = dict(_flat(derived))
    for name in (*MODEL, *COMPARED, *WITHIN_ROLLOUT, *FREE):
        owner, *keys = name.split(".")
        if keys and owner in owners and name not in found:
            found[name] = _plain(reduce(getattr, keys, owners[owner]))
    return found


def describe(thing: Any) -> Any:
    """What an object was built with, as far as it keeps that under the same names: its class, version and options.

    Options that change how fast it works and not what comes out are left out. Objects within it are described likewise.
    """
    if isinstance(thing, (str, int, float, bool, type(None))):
        return thing
    if isinstance(thing, Mapping):
        return {str(key): describe(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [describe(value) for value in thing]
    if type(thing).__module__.partition(".")[0] in ("torch", "numpy", "builtins"):
        return type(thing).__name__
    options = [name for name in inspect.signature(type(thing).__init__).parameters if name not in _SPEED]
    kept = {name: describe(getattr(thing, name)) for name in (*options, "version") if hasattr(thing, name)}
    return {"class": type(thing).__name__, **kept}


def prompts_by_content(prompts: Sequence[Prompt]) -> str:
    """How many there are, and a hash of their texts and metadata."""
    rows = json.dumps([[prompt.text, prompt.metadata] for prompt in prompts], sort_keys=True, default=str)
    return f"{len(prompts)} ({content_hash(rows.encode())})"


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that shape numbers."""
    return {name: version(name) for name in PACKAGES}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in nested.items():
        inner = isinstance(value, Mapping) and value
        found += _flat(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
