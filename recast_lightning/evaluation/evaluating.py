"""Evaluates: the part of the LightningModule that validates, tests and predicts.

Shape legend: B batch, R rewards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric

from recast_lightning.evaluation.tag_means import TagMeans
from recast_lightning.policy import Policy
from recast_lightning.rewards import GenEval, RewardModel
from recast_lightning.rewards.geneval.geneval import TAGS
from recast_lightning.rollout.finite import OnNonfinite
from recast_lightning.training.sampling import SamplingModule


class EvaluatingModule(SamplingModule):
    """Validates, tests and predicts with the averaged adapter; the arguments are those of `SamplingModule`."""

    def __init__(
        self,
        policy: Policy,
        rewards: dict[str, RewardModel],
        num_workers: int = 0,
        reward_device: str | list[str] | None = None,
        reward_offload: bool = False,
        on_nonfinite: OnNonfinite = "stop",
    ) -> None:
        super().__init__(policy, rewards, num_workers, reward_device, reward_offload, on_nonfinite)
        self.evaluation_means = nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in rewards})
        self.tag_means = nn.ModuleDict({name: TagMeans() for name, r in rewards.items() if isinstance(r, GenEval)})

    def evaluate_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Draw and score evaluation prompts with the averaged policy.

        The noise is keyed by a prompt's text and how often it came before, so every method, seed and world size starts
        from the same noise.
        """
        keys = [("evaluation", p.text, o) for p, o in zip(batch["prompts"], batch["occurrence"], strict=True)]
        self.safe_point()
        images = self.policy.decode(self.draw(keys, batch["prompts"], "ema"))
        scores = self.score(images, batch["prompts"], list(self.reward_models))
        texts = [p.text for p in batch["prompts"]]
        return {
            "index": batch["index"],
            "real": batch["real"],
            "texts": texts,
            "images": images.cpu(),
            "scores": scores,
        }

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Evaluate; the means of all rewards become `val/<name>`."""
        return self._evaluation_step(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """As validation, under `test/<name>`."""
        return self._evaluation_step(batch, "test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Images and scores."""
        return self.evaluate_batch(batch)

    def _evaluation_step(self, batch: dict[str, Any], prefix: str) -> dict[str, Any]:
        result = self.evaluate_batch(batch)
        real = torch.tensor(result["real"])
        for name, column in zip(self.reward_models, result["scores"].T, strict=True):
            metric = self.evaluation_means[name]
            metric.update(column[real].to(self.device))  # type: ignore[operator]
            self.log(f"{prefix}/{name}", metric, on_epoch=True, batch_size=len(real))  # type: ignore[arg-type]
            if name in self.tag_means:
                prompts = batch["prompts"]
                rows = [i for i, p in enumerate(prompts) if result["real"][i] and p.metadata.get("tag") in TAGS]
                self.tag_means[name].update(column[rows].to(self.device), [prompts[i] for i in rows])  # type: ignore[operator]
        return result

    def on_validation_epoch_end(self) -> None:
        """Log GenEval's means over tags, and their mean, as `val/<name>/overall`."""
        if self.trainer.state.fn == "fit":
            # Lightning's own count of steps is off by one after some resumes
            self.log("step", float(self.global_step), sync_dist=True)
        self._log_tag_means("val")

    def on_test_epoch_end(self) -> None:
        """As in validation."""
        self._log_tag_means("test")

    def _log_tag_means(self, prefix: str) -> None:
        for name, metric in self.tag_means.items():
            means = metric.compute()  # type: ignore[operator]
            finite = {f"{prefix}/{name}/{tag}": mean.float() for tag, mean in means.items() if mean.isfinite()}
            self.log_dict(finite, sync_dist=True)
            metric.reset()  # type: ignore[operator]
