"""Drawing, scoring and evaluating: the half of the LightningModule that trains nothing.

Shape legend: B batch, R rewards, C H W latents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from recast_lightning.data import PromptDataModule
from recast_lightning.policy import Adapter, Policy
from recast_lightning.prompts import Prompt
from recast_lightning.rewards import RewardModel
from recast_lightning.seeds import noise as keyed_noise


class SamplingModule(L.LightningModule):
    """A policy and its rewards: validates, tests and predicts with the averaged adapter.

    Args:
        policy: the text-to-image policy.
        rewards: name → reward model; all are evaluated.
    """

    def __init__(self, policy: Policy, rewards: dict[str, RewardModel]) -> None:
        super().__init__()
        for name in rewards:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"Reward name {name!r} must be made of letters, digits and '_'.")
        self.policy = policy
        self.reward_models = rewards
        self.evaluation_means = nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in rewards})

    @property
    def data(self) -> PromptDataModule:
        """The data module of the run."""
        data: PromptDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    def score(self, images: Tensor, prompts: Sequence[Prompt], names: Sequence[str]) -> Tensor:
        """Scores [B, R] of images [B, 3, H, W] in [0, 1] by the named rewards; NaN where one could not score."""
        columns = [self.reward_models[name].to(self.device)(images, prompts) for name in names]
        return torch.stack(columns, 1)

    def draw(self, keys: Sequence[tuple[str | int, ...]], prompts: Sequence[Prompt], adapter: Adapter | None) -> Tensor:
        """Latents x_0 [B, C, H, W] of prompts, from noise keyed by `keys`."""
        noise = keyed_noise(self.policy.latent_shape, keys).to(self.device)
        with self.trainer.precision_plugin.forward_context():
            return self.policy.sample(noise, self.policy.encode_prompts([p.text for p in prompts]), adapter)

    def evaluate_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Draw and score evaluation prompts with the averaged policy.

        The noise is keyed by a prompt's text and how often it came before, so every method, seed and world size starts
        from the same noise.
        """
        keys = [("evaluation", p.text, o) for p, o in zip(batch["prompts"], batch["occurrence"], strict=True)]
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
        return result
