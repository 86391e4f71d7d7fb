"""What a rollout looks like in numbers.

Shape legend: N samples, R rewards, T levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.rollout.finite import finite_rows
from recast_lightning.rollout.processes import gather_values


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


def within_group_spread(thumbnails: Tensor, groups: Sequence[int]) -> float:
    """How much the images of a prompt differ: their std at each pixel, averaged over pixels and all processes' groups.

    Args:
        thumbnails: images in [0, 1], [N, ...]; those with NaN are left out.
        groups: which prompt each answers, [N].
    """
    spreads = []
    whole, member = finite_rows(thumbnails), torch.tensor(groups)
    for group in dict.fromkeys(groups):
        images = thumbnails[whole & (member == group)]
        if len(images) > 1:
            spreads.append(images.std(0).mean().item())
    everyone = [spread for spreads in gather_values(spreads) for spread in spreads]
    return sum(everyone) / len(everyone) if everyone else float("nan")
