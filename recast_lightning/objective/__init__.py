"""The objective: advantages of weighted rewards, DiffusionNFT's loss, the old policy's schedule. Pure tensor code."""

from recast_lightning.objective.advantages import (
    Aggregation,
    Spread,
    group_advantages,
    level_advantages,
    optimality_probability,
)
from recast_lightning.objective.nft_loss import NFTTerms, nft_loss, nft_terms
from recast_lightning.objective.old_policy import old_policy_decay

__all__ = [
    "Aggregation",
    "NFTTerms",
    "Spread",
    "group_advantages",
    "level_advantages",
    "nft_loss",
    "nft_terms",
    "old_policy_decay",
    "optimality_probability",
]
