"""Which samples of a rollout a process draws, and what they are trained on.

Shape legend: N samples on this process, T levels, C H W latents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recast_lightning.seeds import generator


@dataclass(frozen=True)
class SampleId:
    """Names one image of a rollout: its group, the prompt's place in the source, and which image of the group it is."""

    group: int
    prompt: int
    image: int


@dataclass(frozen=True)
class RolloutBuffer:
    """The samples of one rollout, ready to train on.

    Attributes:
        samples: their names, [N].
        latents: x_0, [N, C, H, W], on the CPU.
        texts: their prompts, [N].
        optimality_probability: r in [0, 1] per sample and level, [N, T]; NaN where a score is missing.
    """

    samples: list[SampleId]
    latents: Tensor
    texts: list[str]
    optimality_probability: Tensor


@dataclass(frozen=True)
class TrainItem:
    """What one training step sees: a micro-batch, each image of it at one level.

    Attributes:
        latents: x_0, [B, C, H, W].
        noise: [B, C, H, W].
        levels: t of each image, in 1 … T, [B], on the CPU.
        texts: prompts, [B].
        optimality_probability: r in [0, 1], [B]; NaN rows do not train.
        place: where in the run it stands, for messages.
    """

    latents: Tensor
    noise: Tensor
    levels: Tensor
    texts: list[str]
    optimality_probability: Tensor
    place: str = ""

    def to(self, device: torch.device) -> TrainItem:
        """Move the tensors."""
        moved = {name: getattr(self, name).to(device) for name in ("latents", "noise", "optimality_probability")}
        return replace(self, **moved)

    def where(self, row: int) -> str:
        """Where in the run an image stands, for messages."""
        return f"{self.place}, level {int(self.levels[row])}, prompt {self.texts[row]!r}"


def plan_samples(
    prompts: list[int], group_size: int, rank: int, world_size: int, seed: int, rollout: int
) -> list[SampleId]:
    """The samples of one process, whole groups only, in training order.

    The order goes slot by slot (each group's k-th image in its own shuffle), so the k-th part of an epoch holds the same
    images for every world size, and an optimizer step averages over the same set.
    """
    groups = range(rank, len(prompts), world_size)
    orders = {g: torch.randperm(group_size, generator=generator(seed, "order", rollout, g)).tolist() for g in groups}
    return [SampleId(g, prompts[g], orders[g][slot]) for slot in range(group_size) for g in groups]


def check_sizes(prompts_per_rollout: int, group_size: int, micro_batch_size: int, world_size: int) -> None:
    """Refuse sizes that do not divide.

    Raises:
        ValueError: with the nearest legal values.
    """
    if prompts_per_rollout % world_size:
        below, above = _nearest_multiples(prompts_per_rollout, world_size)
        raise ValueError(
            f"prompts_per_rollout {prompts_per_rollout} does not split into whole groups on {world_size} processes: "
            f"take {f'{below} or ' if below else ''}{above}."
        )
    samples = prompts_per_rollout // world_size * group_size
    if samples % micro_batch_size:
        divisors = [d for d in range(1, samples + 1) if samples % d == 0]
        below = max(d for d in divisors if d <= micro_batch_size)
        above = min((d for d in divisors if d >= micro_batch_size), default=samples)
        raise ValueError(
            f"micro_batch_size {micro_batch_size} does not divide the {samples} images of a rollout on each process "
            f"({prompts_per_rollout} prompts × {group_size} / {world_size}): take {below} or {above}."
        )


def _nearest_multiples(value: int, of: int) -> tuple[int, int]:
    return value // of * of, -(-value // of) * of
