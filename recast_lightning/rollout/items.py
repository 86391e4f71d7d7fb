"""The items that training steps see: micro-batches of a rollout, each at some or all levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recast_lightning.rollout.options import RolloutOptions
from recast_lightning.rollout.samples import RolloutBuffer, TrainItem
from recast_lightning.seeds import generator
from recast_lightning.seeds import noise as keyed_noise


@dataclass(frozen=True)
class TrainItems:
    """Which items a rollout is trained on, in which order.

    Args:
        options: size of a micro-batch, and at which share of the levels it trains.
        num_levels: T.
        seed: keys levels and noise.
    """

    options: RolloutOptions
    num_levels: int
    seed: int

    @property
    def levels_per_batch(self) -> int:
        """At how many levels each micro-batch trains."""
        return max(1, round(self.options.timestep_fraction * self.num_levels))

    def count(self, num_samples: int) -> int:
        """How many items there are of a process's samples: micro-batches × levels."""
        return num_samples // self.options.micro_batch_size * self.levels_per_batch

    def item(self, buffer: RolloutBuffer, rollout: int, place: int) -> TrainItem:
        """The item at a place of a rollout: micro-batches in order, each at its levels in an order of its own."""
        batch, turn = divmod(place, self.levels_per_batch)
        order = torch.randperm(self.num_levels, generator=generator(self.seed, "levels", rollout, batch))
        level = int(order[turn]) + 1
        rows = slice(batch * self.options.micro_batch_size, (batch + 1) * self.options.micro_batch_size)
        keys = [(self.seed, "train", rollout, level, s.group, s.image) for s in buffer.samples[rows]]
        noise = keyed_noise(buffer.latents.shape[1:], keys)
        return TrainItem(
            latents=buffer.latents[rows],
            noise=noise,
            level=level,
            texts=buffer.texts[rows],
            optimality_probability=buffer.optimality_probability[rows, level - 1],
            place=f"Rollout {rollout + 1}, micro-batch {batch + 1}, level {level}",
        )
