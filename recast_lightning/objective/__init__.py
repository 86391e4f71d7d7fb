"""The objective: advantages, DiffusionNFT's loss, the schedules of old policy and EMA. Pure tensor code."""

from recast_lightning.objective.advantages import (
    Advantages,
    Aggregation,
    Spread,
    group_advantages,
    level_advantages,
    optimality_probability,
)
from recast_lightning.objective.nft_loss import NFTLoss, NFTTerms, nft_loss
from recast_lightning.objective.schedules import OldPolicySchedule, ema_decay

__all__ = [
    "Advantages",
    "Aggregation",
    "NFTLoss",
    "NFTTerms",
    "OldPolicySchedule",
    "Spread",
    "ema_decay",
    "group_advantages",
    "level_advantages",
    "nft_loss",
    "optimality_probability",
]
