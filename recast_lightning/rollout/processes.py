"""Values of all processes."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def gather_values(value: _T) -> list[_T]:
    """The values of all processes, in order."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
