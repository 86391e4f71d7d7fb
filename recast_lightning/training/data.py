"""Prompts for rollouts, validation and prediction."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from recast_lightning.checkpointing.settings import prompts_by_content
from recast_lightning.evaluation.batches import EvaluationBatches
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.prompts.readers import read_prompts
from recast_lightning.ranges import check_ranges
from recast_lightning.rewards import RewardModel
from recast_lightning.rollout.stream import RolloutStream
from recast_lightning.seeds import generator


def load_prompts(source: str, *, ocr: bool) -> list[Prompt]:
    """Prompts of a `.txt` or `.jsonl` file, or of `signboard:SPLIT:COUNT`.

    Args:
        source: e.g. `prompts.txt`, `metadata.jsonl`, `signboard:train:2000`.
        ocr: whether each prompt must name a text to be read.

    Raises:
        ValueError: if the source is malformed, missing or lacks an OCR target.
    """
    if not source.startswith("signboard:"):
        return read_prompts(source, ocr=ocr)
    from recast_lightning.signboard.world import make_prompts

    parts = source.split(":")
    if len(parts) != 3 or not parts[2].isdigit() or int(parts[2]) < 1:
        raise ValueError(
            f"Prompt source {source!r} is malformed: write signboard:SPLIT:COUNT, e.g. signboard:train:2000."
        )
    return make_prompts(int(parts[2]), seed=0, split=parts[1])


class PromptDataModule(L.LightningDataModule):
    """Streams prompts. Groups are keyed by a prompt's place in its source, so two equal lines are two groups.

    Args:
        train: source of training prompts: `.txt`, `.jsonl`, or `signboard:SPLIT:COUNT`.
        validation: source of the fixed evaluation prompts (`validate`, `test` and during `fit`).
        predict: source for `predict`; default the validation prompts.
        prompts_per_rollout: groups in a rollout, over all processes.
        group_size: images of each prompt.
        evaluation_batch_size: images sampled at once in evaluation.
    """

    def __init__(
        self,
        train: str = "signboard:train:4000",
        validation: str = "signboard:validation:128",
        predict: str | None = None,
        prompts_per_rollout: int = 48,
        group_size: int = 24,
        evaluation_batch_size: int = 32,
    ) -> None:
        super().__init__()
        if group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {group_size}: advantages compare images of one prompt."
            )
        check_ranges(locals(), {"prompts_per_rollout": "[1, inf)", "evaluation_batch_size": "[1, inf)"})
        self.sources = {"train": train, "validation": validation, "predict": predict or validation}
        self.prompts_per_rollout, self.group_size = prompts_per_rollout, group_size
        self.evaluation_batch_size = evaluation_batch_size
        self.prompts: dict[str, list[Prompt]] = {}

    def load_for(self, rewards: Iterable[RewardModel]) -> None:
        """Read all prompts, which is cheap, and check that every reward finds in them what it needs.

        Raises:
            ValueError: if a source is malformed, missing, too short, or lacks what a reward needs.
        """
        rewards = list(rewards)
        self.load(ocr=any("ocr" in reward.needs for reward in rewards))
        for reward in rewards:
            for prompts in self.prompts.values():
                reward.check_prompts(prompts)

    def load(self, *, ocr: bool) -> None:
        """Read all prompts, each with its OCR target if `ocr`; does nothing the second time."""
        if self.prompts:
            return
        loaded = {source: load_prompts(source, ocr=ocr) for source in dict.fromkeys(self.sources.values())}
        self.prompts = {name: loaded[source] for name, source in self.sources.items()}
        if len(self.prompts["train"]) < self.prompts_per_rollout:
            raise ValueError(
                f"prompts_per_rollout is {self.prompts_per_rollout}, but {self.sources['train']!r} has only "
                f"{len(self.prompts['train'])} prompts."
            )

    @cached_property
    def contents(self) -> dict[str, str]:
        """`train` and `validation` prompts by content, hashed once: every checkpoint tells them."""
        return {name: prompts_by_content(self.prompts[name]) for name in ("train", "validation")}

    def rollout_prompts(self, rollout: int, seed: int) -> list[int]:
        """Indices of the training prompts of a rollout: the next ones of an endless, shuffled pass over the source."""
        count, size = len(self.prompts["train"]), self.prompts_per_rollout
        places = range(rollout * size, (rollout + 1) * size)
        passes = {
            p: torch.randperm(count, generator=generator(seed, "prompts", p)) for p in {i // count for i in places}
        }
        return [int(passes[i // count][i % count]) for i in places]

    def fit_prompts(self, rollouts: range, seed: int) -> list[Prompt]:
        """All that a fit encodes: the training prompts of these rollouts, and the validation prompts."""
        places = sorted({place for rollout in rollouts for place in self.rollout_prompts(rollout, seed)})
        return [self.prompts["train"][place] for place in places] + self.prompts["validation"]

    def train_dataloader(self) -> RolloutStream:
        """One epoch is one rollout: sampled when iteration starts, then served as micro-batches."""
        assert self.trainer is not None
        stream: RolloutStream = self.trainer.lightning_module.rollout_stream()  # type: ignore[operator]
        return stream

    def samples_per_process(self, world_size: int) -> int:
        """Samples of a rollout on each process: whole groups."""
        return self.prompts_per_rollout // world_size * self.group_size

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        assert self.trainer is not None
        place = (self.trainer.global_rank, self.trainer.world_size)
        batches = EvaluationBatches(self.prompts[split], self.evaluation_batch_size, *place)
        return DataLoader(batches, batch_size=None)

    def val_dataloader(self) -> DataLoader[Any]:
        """Evaluation prompts, each on exactly one process."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """The same prompts as validation."""
        return self._evaluation_loader("validation")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Prompts to draw."""
        return self._evaluation_loader("predict")
