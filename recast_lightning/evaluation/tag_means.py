"""GenEval's overall score: the mean over tags, not over images (Ghosh et al. 2023)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.geneval.geneval import TAGS


class TagMeans(Metric):
    """Mean score of each of GenEval's six tags, and the mean of these; over all processes.

    Scores that are NaN are left out. A tag of which no score is left has the mean NaN, and so has the whole.
    """

    full_state_update = False
    total: Tensor
    scored: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(len(TAGS), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("scored", torch.zeros(len(TAGS), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(len(TAGS), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, scores: Tensor, prompts: Sequence[Prompt]) -> None:
        """Take in scores [B] and their prompts.

        Raises:
            ValueError: If their numbers differ, or a prompt has none of the six tags.
        """
        if scores.shape != (len(prompts),):
            raise ValueError(f"There are scores of shape {list(scores.shape)} for {len(prompts)} prompts.")
        for prompt in prompts:
            if prompt.metadata.get("tag") not in TAGS:
                raise ValueError(
                    f"The prompt {prompt.text!r} has the tag {prompt.metadata.get('tag')!r}: expected one of "
                    f"{', '.join(TAGS)}, which GenEval's mean is over."
                )
        tags = torch.tensor([TAGS.index(prompt.metadata["tag"]) for prompt in prompts], dtype=torch.long)
        tags, scores = tags.to(self.total.device), scores.to(self.total)
        known = ~scores.isnan()
        self.total.index_add_(0, tags[known], scores[known])
        self.scored += torch.bincount(tags[known], minlength=len(TAGS))
        self.seen += torch.bincount(tags, minlength=len(TAGS))

    def compute(self) -> dict[str, Tensor]:
        """``overall`` and the mean of each tag that occurred; ``overall`` is NaN if none did."""
        present = self.seen > 0
        means = self.total / self.scored  # 0 / 0 is NaN
        each = {tag: means[i] for i, tag in enumerate(TAGS) if present[i]}
        return {"overall": means[present].mean(), **each}
