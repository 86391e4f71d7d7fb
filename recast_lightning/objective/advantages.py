"""From rewards to advantages at each noise level, and to the optimality probability r.

Shape legend: N samples of a rollout, R rewards, T noise levels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["sum", "per_reward"]


Spread = Literal["level", "group"]


@dataclass(frozen=True)
class Advantages:
    """From rewards to advantages at each level, see `level_advantages`.

    Args:
        std: `level` (all samples of a level, as published) or `group`.
        aggregation: `sum` (advantages of the weighted sum, as published) or `per_reward` (of each reward, then summed).
    """

    std: Spread = "level"
    aggregation: Aggregation = "sum"

    def __post_init__(self) -> None:
        if self.std not in ("level", "group"):
            raise ValueError(f"advantages.std must be 'level' or 'group', got {self.std!r}.")
        if self.aggregation not in ("sum", "per_reward"):
            raise ValueError(f"advantages.aggregation must be 'sum' or 'per_reward', got {self.aggregation!r}.")

    def __call__(self, rewards: Tensor, level_weights: Tensor, groups: Tensor) -> Tensor:
        """Advantages [N, T] of rewards [N, R] with weights [R, T], of groups [N]."""
        return level_advantages(rewards, level_weights, groups, aggregation=self.aggregation, std=self.std)


def level_advantages(
    rewards: Tensor,
    level_weights: Tensor,
    groups: Tensor,
    *,
    aggregation: Aggregation = "sum",
    std: Spread = "level",
    eps: float = 1e-4,
) -> Tensor:
    """Advantages at each level of rewards that count differently from level to level.

    With w = ``level_weights`` (T W, so that they sum to 1 at each level) and `group_advantages` A[.]:

        sum         A_t = A[sum_i w_i,t r_i]                              (DiffusionNFT; ReCAST weighs the rewards)
        per_reward  A_t = S_t / (rms S_t + eps),  S_t = sum_i w_i,t A[r_i]       (GDPO, arXiv 2601.05242)

    GDPO's last step normalises S_t over the batch. Every group of S_t has mean 0, so that only the scale is left to do:
    the rms over all samples is the std, and a group without differences keeps exactly 0.

    A sample that lacks a score gets NaN. ``sum`` leaves it out of its group altogether; ``per_reward`` leaves it out of
    the statistics of the reward that failed, and its other scores still serve its group. Rewards without weight at any
    level are ignored.

    Args:
        rewards: r, [N, R], not finite where a score failed.
        level_weights: w, [R, T].
        groups: Which prompt each sample answers, [N]; any integers.
        aggregation: See above.
        std: Of `group_advantages`; for ``per_reward``, ``level`` means all samples of that reward.
        eps: Added to every std.

    Returns:
        Advantages, [N, T], in float64.
    """
    if aggregation not in ("sum", "per_reward"):
        raise ValueError(f"aggregation must be 'sum' or 'per_reward', got {aggregation!r}.")
    used = level_weights.ne(0).any(1)
    scores, weights = rewards[:, used].double(), level_weights[used].double()
    if aggregation == "sum":
        return group_advantages(_weighted_sum(scores, weights), groups, std=std, eps=eps)
    total = _weighted_sum(group_advantages(scores, groups, std=std, eps=eps), weights)
    valid = total.isfinite()
    scale = _group_mean(total.square(), valid, torch.zeros_like(groups)).sqrt()
    return torch.where(scale > 0, total / (scale + eps), 0.0).where(valid, torch.nan)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Values [N, R] times weights [R, T], [N, T], equal bit by bit for equal rows, which a matrix product's are not."""
    total = values.new_zeros(len(values), weights.shape[1])
    for column, row in zip(values.T, weights, strict=True):
        total = total + column[:, None] * row
    return total


def group_advantages(rewards: Tensor, groups: Tensor, *, std: Spread = "level", eps: float = 1e-4) -> Tensor:
    """Advantages A = (reward - group mean) / (std + eps), at each noise level on its own.

    A group of equal rewards gets exactly 0, whatever the constant: everything is measured from the group's smallest
    reward. Rewards that are not finite are left out of mean and std and get NaN, for the caller to drop.

    Args:
        rewards: [N], or [N, ...] with columns that do not see each other (levels or rewards).
        groups: Which prompt each sample answers, [N]; any integers.
        std: ``level`` for the (population) std over all samples of a level, ``group`` for that of the sample's group.
        eps: Added to the std.

    Returns:
        Advantages in the shape of ``rewards``, in float32 or wider.
    """
    if std not in ("level", "group"):
        raise ValueError(f"std must be 'level' or 'group', got {std!r}.")
    if groups.shape != rewards.shape[:1]:
        raise ValueError(f"groups must be [{len(rewards)}], one id a reward, got {list(groups.shape)}.")
    valid = rewards.isfinite()
    member = torch.unique(groups, return_inverse=True)[1]
    centred = _centre(rewards.double(), valid, member)
    deviation = centred if std == "group" else _centre(rewards.double(), valid, torch.zeros_like(member))
    scale = _group_mean(deviation.square(), valid, member if std == "group" else torch.zeros_like(member)).sqrt()
    advantages = torch.where(scale > 0, centred / (scale + eps), 0.0).where(valid, torch.nan)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def _group_mean(values: Tensor, valid: Tensor, member: Tensor) -> Tensor:
    """Mean of the valid values of each sample's group, laid out per sample, [N, ...]."""
    shape = (int(member.max()) + 1, *values.shape[1:])
    total = values.new_zeros(shape).index_add(0, member, values.where(valid, 0.0))
    count = values.new_zeros(shape).index_add(0, member, valid.to(values.dtype))
    return (total / count.clamp(min=1))[member]


def _centre(values: Tensor, valid: Tensor, member: Tensor) -> Tensor:
    """Values less their group mean; measured from the group minimum, so that equal values give exactly 0."""
    shape = (int(member.max()) + 1, *values.shape[1:])
    lowest = values.new_full(shape, torch.inf).index_reduce(0, member, values.where(valid, torch.inf), "amin")[member]
    shifted = (values - lowest).where(valid, 0.0)
    return shifted - _group_mean(shifted, valid, member)


def optimality_probability(advantages: Tensor, clip: float) -> Tensor:
    """Optimality probability r = clip(A / c, -1, 1) / 2 + 1 / 2 (DiffusionNFT, Sec. 3: optimality reward).

    Args:
        advantages: A, any shape.
        clip: c > 0.
    """
    return (advantages / clip).clamp(-1, 1) / 2 + 0.5
