"""The items that training steps see: micro-batches of a rollout, each image at a level of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recast_lightning.rollout.options import RolloutOptions
from recast_lightning.rollout.samples import RolloutBuffer, TrainItem
from recast_lightning.seeds import generator
from recast_lightning.seeds import noise as keyed_noise


@dataclass(frozen=True)
class TrainItems:
    """Which items a rollout is trained on, in which order.

    Args:
        options: size of a micro-batch, and at which share of the levels an image trains.
        num_levels: T.
        seed: keys levels and noise.
    """

    options: RolloutOptions
    num_levels: int
    seed: int

    @property
    def levels_per_image(self) -> int:
        """At how many levels each image trains: the share of T rounded down, as published, and at least one."""
        return max(1, int(self.options.timestep_fraction * self.num_levels))

    def count(self, num_samples: int) -> int:
        """How many items there are of a process's samples: micro-batches × levels of an image."""
        return num_samples // self.options.micro_batch_size * self.levels_per_image

    def item(self, buffer: RolloutBuffer, rollout: int, place: int) -> TrainItem:
        """The item at a place of a rollout: micro-batches in order, each once for every level of its images."""
        batch, turn = divmod(place, self.levels_per_image)
        levels = self._levels(rollout, batch)[:, turn]
        rows = slice(batch * self.options.micro_batch_size, (batch + 1) * self.options.micro_batch_size)
        named = zip(levels.tolist(), buffer.samples[rows], strict=True)
        keys = [(self.seed, "train", rollout, level, s.group, s.image) for level, s in named]
        return TrainItem(
            latents=buffer.latents[rows],
            noise=keyed_noise(buffer.latents.shape[1:], keys),
            levels=levels,
            texts=buffer.texts[rows],
            optimality_probability=buffer.optimality_probability[rows].gather(1, levels[:, None] - 1)[:, 0],
            place=f"Rollout {rollout + 1}, micro-batch {batch + 1}",
        )

    def _levels(self, rollout: int, batch: int) -> Tensor:
        """The levels of a micro-batch's images in their order, [B, levels per image].

        The images start at places spread evenly over one random circle of all levels, and go round it. So each image has
        levels of its own, none twice and each with the same probability, and each item has all levels about equally.
        """
        size, draw = self.options.micro_batch_size, generator(self.seed, "levels", rollout, batch)
        circle = torch.randperm(self.num_levels, generator=draw) + 1
        starts = torch.randperm(size, generator=draw) * self.num_levels // size
        return circle[(starts[:, None] + torch.arange(self.levels_per_image)) % self.num_levels]
