"""Evaluates the averaged policy.

Shape legend: B batch, R rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recast_lightning.evaluation.batches import EvaluationBatch
from recast_lightning.policy import Policy
from recast_lightning.rollout.context import RunContext
from recast_lightning.rollout.sampling import sample_latents
from recast_lightning.rollout.scoring import ScoringPool


@dataclass
class Evaluation:
    """What came of a batch.

    Attributes:
        index: places of the prompts in their source, [B].
        real: False for repeats that count for nothing, [B].
        texts: the prompts, [B].
        images: [B, 3, H, W] in [0, 1], on the CPU.
        scores: [B, R], NaN where a reward could not score.
    """

    index: list[int]
    real: list[bool]
    texts: list[str]
    images: Tensor
    scores: Tensor


class Evaluator:
    """Draws evaluation prompts with the `ema` adapter and scores them with all rewards.

    The noise is keyed by a prompt's text and how often it came before, so every method, seed and number of processes
    starts from the same noise.

    Args:
        policy: what is evaluated.
        scoring: scores images.
    """

    def __init__(self, policy: Policy, scoring: ScoringPool) -> None:
        self.policy, self.scoring = policy, scoring

    def evaluate(self, batch: EvaluationBatch, context: RunContext) -> Evaluation:
        """Draw and score one batch."""
        texts = [prompt.text for prompt in batch.prompts]
        keys = [("evaluation", text, n) for text, n in zip(texts, batch.occurrence, strict=True)]
        context.stop_point()
        images = self.policy.decode(sample_latents(self.policy, keys, texts, "ema", context))
        scores = self.scoring.score(images, batch.prompts, list(self.scoring.models))
        return Evaluation(batch.index, batch.real, texts, images.cpu(), scores)
