"""Proposals drawn by the policy itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.proposals.base import Proposals


class PolicyProposals(Proposals):
    """The policy's own images, each reward weighting them by its score: no second generator is needed.

    Their weight is what makes them stand for a positive policy, so where a reward finds few good ones among them, they
    say little: such a reward is refused before anything is spent on it. docs/credit.md shows how far this goes.

    Args:
        per_prompt: images of each prompt.
        minimum_share: smallest effective share of a prompt's images, 1 where all score alike, 1 / per_prompt where one
            has all of the score.
    """

    def __init__(self, per_prompt: int = 8, minimum_share: float = 0.5) -> None:
        if per_prompt < 2:
            raise ValueError(f"per_prompt must be at least 2, got {per_prompt}: weights compare images of a prompt.")
        self.per_prompt, self.minimum_share = per_prompt, minimum_share

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """See `Proposals.validate`: any prompt will do."""

    def images(self, prompts: Sequence[Prompt], height: int, width: int) -> Tensor:
        """Not for this source: the profiler draws them from the policy."""
        raise NotImplementedError("The policy itself draws these.")
