"""Rollouts: which samples a process draws and scores, and in which order they are trained on.

Shape legend: N samples on this process, R rewards, T levels, C H W latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.seeds import generator


@dataclass(frozen=True)
class Sample:
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
        optimality: r in [0, 1] per sample and level, [N, T]; NaN where a score is missing.
    """

    samples: list[Sample]
    latents: Tensor
    texts: list[str]
    optimality: Tensor


@dataclass(frozen=True)
class TrainItem:
    """What one training step sees: a micro-batch at one level.

    Attributes:
        latents: x_0, [B, C, H, W].
        noise: [B, C, H, W].
        level: t in 1 … T.
        texts: prompts, [B].
        optimality: r in [0, 1], [B]; NaN rows do not train.
    """

    latents: Tensor
    noise: Tensor
    level: int
    texts: list[str]
    optimality: Tensor

    def to(self, device: torch.device) -> TrainItem:
        """Move the tensors."""
        moved = {name: getattr(self, name).to(device) for name in ("latents", "noise", "optimality")}
        return replace(self, **moved)


def plan_samples(
    prompts: list[int], group_size: int, rank: int, world_size: int, seed: int, rollout: int
) -> list[Sample]:
    """The samples of one process, whole groups only, in training order.

    The order goes slot by slot (each group's k-th image in its own shuffle), so the k-th part of an epoch holds the same
    images for every world size, and an optimizer step averages over the same set.
    """
    groups = range(rank, len(prompts), world_size)
    orders = {g: torch.randperm(group_size, generator=generator(seed, "order", rollout, g)).tolist() for g in groups}
    return [Sample(g, prompts[g], orders[g][slot]) for slot in range(group_size) for g in groups]


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


def rollout_metrics(names: list[str], rewards: Tensor, advantages: Tensor, r: Tensor) -> dict[str, float]:
    """What a rollout looks like in numbers, over all processes; failed scores are counted and left out.

    Args:
        names: the rewards, [R].
        rewards: scores, [N, R], NaN where one failed.
        advantages: [N, T], NaN where a sample does not train.
        r: optimality probabilities, [N, T], likewise.
    """
    metrics: dict[str, float] = {}
    for name, column in zip(names, rewards.T, strict=True):
        valid = column[column.isfinite()]
        metrics[f"reward/{name}/mean"] = valid.mean().item()
        metrics[f"reward/{name}/std"] = valid.std().item()
        metrics[f"reward/{name}/failed"] = float(len(column) - len(valid))
    finite = r[r.isfinite()]
    metrics |= {"r/mean": finite.mean().item(), "r/std": finite.std().item()}
    metrics["r/clipped_share"] = ((finite == 0) | (finite == 1)).float().mean().item()
    metrics["advantage/dead_share"] = (advantages == 0).float().mean().item()
    return metrics


def check_failures(names: list[str], metrics: dict[str, float], images: int, failure_share: float) -> None:
    """Refuse a rollout that lacks too many scores.

    Args:
        names: the rewards that are trained on.
        metrics: as `rollout_metrics` counts them.
        images: in the rollout, over all processes.
        failure_share: largest share of a reward's scores that may be missing.

    Raises:
        UserError: naming the first reward that failed too often.
    """
    for name in names:
        failed = int(metrics[f"reward/{name}/failed"])
        if failed > failure_share * images:
            raise UserError(
                f"Reward {name!r} could not score {failed} of the {images} images of rollout {metrics['rollout']:.0f}, "
                f"more than the share of {failure_share:g} that failure_share allows: the warnings above say why."
            )


def constant_rewards(names: list[str], rewards: Tensor) -> dict[str, float]:
    """The rewards that gave every image of a rollout the same score, and that score; [N, R], NaN where one failed."""
    found = {}
    for name, column in zip(names, rewards.T, strict=True):
        valid = column[column.isfinite()]
        if len(valid) > 1 and bool((valid == valid[0]).all()):
            found[name] = valid[0].item()
    return found


class RolloutStream:
    """A loader whose every pass is one rollout, drawn lazily when the first item is asked for.

    Its state is only a position: after a stop in the middle, the rollout is drawn again from its counters.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.position, self.resuming = module, 0, False

    def __len__(self) -> int:
        return int(self.module.items_per_rollout)

    def __iter__(self) -> Iterator[TrainItem]:
        if not self.resuming:
            self.position = 0
        self.resuming = False
        return self._items()

    def _items(self) -> Iterator[TrainItem]:
        rollout = self.module.current_epoch
        buffer = self.module.collect(rollout)
        while self.position < len(self):
            self.position += 1
            yield self.module.train_item(buffer, rollout, self.position - 1)

    def state_dict(self) -> dict[str, int]:
        """The position, and of how many."""
        return {"position": self.position, "length": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position."""
        self.position = state["position"]
        self.resuming = self.position < len(self)
