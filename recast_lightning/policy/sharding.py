"""A transformer whose weights are shared out over processes (FSDP2, `torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard(transformer: nn.Module, blocks: Sequence[nn.Module], mesh: Any) -> None:
    """Share out each block of a transformer, then what is left of it, over a one-dimensional device mesh.

    Everything that trains lies within: what did not would get no common gradient, without a warning.
    """
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh)


def reshard(transformer: nn.Module) -> None:
    """Drop gathered weights. After a forward without gradients some stay gathered, and what is written to them is lost."""
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(weight: Tensor) -> Tensor:
    """All of a weight, on the CPU. Where it is shared out, all processes must ask for it."""
    weight = weight.detach()
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).cpu()
