"""Randomness keyed by counters: a seed is a function of what it is for, never of what was drawn before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*key: str | int) -> int:
    """A 63-bit seed from any key, e.g. `derive_seed(seed, "rollout", 3, prompt_index, sample)`."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def generator(*key: str | int) -> torch.Generator:
    """A CPU generator seeded by a key."""
    return torch.Generator().manual_seed(derive_seed(*key))


def noise(shape: Sequence[int], keys: Sequence[tuple[str | int, ...]]) -> Tensor:
    """Standard normal noise [len(keys), *shape], each row from its own key: the same for any batching and world size."""
    return torch.stack([torch.randn(*shape, generator=generator(*key)) for key in keys])
