"""How alike the images of a prompt are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast_lightning.rollout.finite import finite_rows
from recast_lightning.rollout.processes import gather_values


def within_group_spread(thumbnails: Tensor, groups: Sequence[int]) -> float:
    """How much the images of a prompt differ: their std at each pixel, averaged over pixels and all processes' groups.

    Args:
        thumbnails: images in [0, 1], [N, ...]; those with NaN are left out.
        groups: which prompt each answers, [N].
    """
    spreads = []
    whole, member = finite_rows(thumbnails), torch.tensor(groups)
    for group in dict.fromkeys(groups):
        images = thumbnails[whole & (member == group)]
        if len(images) > 1:
            spreads.append(images.std(0).mean().item())
    everyone = [spread for spreads in gather_values(spreads) for spread in spreads]
    return sum(everyone) / len(everyone) if everyone else float("nan")
