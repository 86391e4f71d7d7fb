"""Encoded prompts: named tensors, a row a prompt.

Shape legend: B prompts, L text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Condition:
    """What a model family makes of B prompts: tensors [B, ...] under names of the family's own.

    A family whose prompts differ in length keeps a mask among its tensors, 0 where there is no token.
    """

    tensors: dict[str, Tensor]

    def __getitem__(self, rows: Tensor) -> Condition:
        return Condition({name: tensor[rows] for name, tensor in self.tensors.items()})

    def to(self, device: torch.device) -> Condition:
        """Move all tensors."""
        return Condition({name: tensor.to(device) for name, tensor in self.tensors.items()})

    @classmethod
    def stack(cls, parts: Sequence[Condition]) -> Condition:
        """Parts of one family below each other; zeros are put behind tensors [B, L, ...] that are shorter than others."""
        return cls({name: _stack([part.tensors[name] for part in parts]) for name in parts[0].tensors})


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        longest = max(tensor.shape[1] for tensor in tensors)
        tensors = [pad(t, (*(0, 0) * (t.ndim - 2), 0, longest - t.shape[1])) for t in tensors]
    return torch.cat(list(tensors))
