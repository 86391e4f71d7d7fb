"""Means of an evaluation over all processes.

Shape legend: B batch, R rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from recast_lightning.evaluation.tag_means import TagMeans
from recast_lightning.prompts import Prompt
from recast_lightning.rewards import GenEval, RewardModel
from recast_lightning.rewards.geneval.geneval import TAGS


class EvaluationMetrics(nn.Module):
    """The mean of each reward, and of each of GenEval's tags; failed scores and repeats of prompts are left out.

    Args:
        rewards: name → reward model.
    """

    def __init__(self, rewards: Mapping[str, RewardModel]) -> None:
        super().__init__()
        self.means = nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in rewards})
        self.tags = nn.ModuleDict({name: TagMeans() for name, r in rewards.items() if isinstance(r, GenEval)})

    def update(self, prompts: Sequence[Prompt], real: Sequence[bool], scores: Tensor) -> dict[str, MeanMetric]:
        """Take in the scores [B, R] of a batch.

        Returns:
            Name → mean of each reward, for Lightning to log.
        """
        counted = torch.tensor(real)
        tagged = [i for i, p in enumerate(prompts) if real[i] and p.metadata.get("tag") in TAGS]
        means = {name: cast(MeanMetric, metric) for name, metric in self.means.items()}
        for (name, mean), column in zip(means.items(), scores.T, strict=True):
            mean.update(column[counted].to(mean.device))
            if name in self.tags:
                tags = cast(TagMeans, self.tags[name])
                tags.update(column[tagged].to(tags.device), [prompts[i] for i in tagged])
        return means

    def compute_tags(self) -> dict[str, Tensor]:
        """`<reward>/<tag>` and `<reward>/overall` → mean, as far as there is one; starts afresh. A collective call."""
        found: dict[str, Tensor] = {}
        for name, metric in self.tags.items():
            tags = cast(TagMeans, metric)
            found |= {f"{name}/{tag}": mean.float() for tag, mean in tags.compute().items() if mean.isfinite()}
            tags.reset()
        return found
