"""Profiles with known curves, as a measurement would leave them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit import Profile

F64 = torch.float64
_PLACES = {"ocr": 0.75, "clip": 0.25, "geneval": 0.5}  # where on the way to noise a reward falls; others are flat


def falling_curves(rewards: Sequence[str], num_levels: int) -> Tensor:
    """D of each reward, [R, T + 1]: from 1 to 0, steepest at the reward's place, or straight."""
    t = torch.linspace(0, 1, num_levels + 1, dtype=F64)
    steep = {name: torch.sigmoid((place - t) * 12) for name, place in _PLACES.items()}
    return torch.stack([steep.get(name, 1 - t) for name in rewards])


def make_profile(
    rewards: Sequence[str] = ("ocr", "clip", "geneval"),
    num_levels: int = 8,
    *,
    divergence: Tensor | None = None,
    noise: float = 0.01,
    num_replicates: int = 50,
    seed: int = 0,
    **changes: Any,
) -> Profile:
    """A profile whose replicates scatter around its curves.

    Args:
        rewards: Names.
        num_levels: T.
        divergence: The curves, [R, T + 1]; default `falling_curves`.
        noise: Standard deviation of each level in the replicates, independent of the other levels.
        num_replicates: B; 0 for a profile of one prompt.
        seed: Of the replicates.
        changes: Other fields of `Profile`.
    """
    curves = falling_curves(rewards, num_levels) if divergence is None else divergence
    scatter = torch.randn(num_replicates, *curves.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    fields: dict[str, Any] = {
        "divergence": curves,
        "replicates": curves + noise * scatter,
        "nested_bias": torch.zeros_like(curves),
        "mean_rewards": curves.exp() / 3,
        "sigmas": torch.linspace(0, 1, curves.shape[1]),
        "rewards": list(rewards),
        "order": 2.0,
        "posterior": "sde2",
        "steps": "auto",
        "levels": list(range(1, curves.shape[1])),
        "rollouts": [1] * (curves.shape[1] - 1),
        "num_proposals": 17,
        "num_prompts": 9 if num_replicates else 1,
        "failed": {name: 2 * (name == "ocr") for name in rewards},
        "effective_samples": {},
        "network_calls": 306,
        "metadata": {"policy": "signboard", "seed": 7, "note": "π, ü"},
    }
    return Profile(**{**fields, **changes})


def assert_same(one: Any, other: Any) -> None:
    """Two profiles or matrices are equal in every field, bit for bit."""
    assert type(one) is type(other)
    for name, value in vars(one).items():
        twin = getattr(other, name)
        if isinstance(value, Tensor):
            assert twin.dtype == value.dtype, name
            assert twin.equal(value), name
        else:
            assert twin == value, name
            assert type(twin) is type(value), name
