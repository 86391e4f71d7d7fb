"""Proposals drawn by Signboard's own renderer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.proposals.base import Proposals, picture_tensor


class RendererProposals(Proposals):
    """Signboard's own renderer: the embedded stand-in for a strong generator.

    Args:
        seed: keys what a prompt leaves open (tint, sizes, jitter).
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """See `Proposals.validate`."""
        from recast_lightning.signboard.world import parse

        for prompt in prompts:
            parse(prompt)

    def images(self, prompts: Sequence[Prompt], height: int, width: int) -> Tensor:
        """See `Proposals.images`."""
        from recast_lightning.signboard.world import draw, parse

        return torch.stack([picture_tensor(draw(parse(p), self.seed), height, width) for p in prompts])
