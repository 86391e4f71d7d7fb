"""Which completions a profile takes: from which levels, how many, by which steps.

Shape legend: L measured levels, S calls of the longest completion, J completions of a proposal at a level, K points of
the noise's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recast_lightning.flow.noising import check_grid
from recast_lightning.flow.posterior import Posterior, Step, posterior_grid, posterior_steps

Steps = int | Literal["auto", "grid"]


@dataclass(frozen=True)
class Plan:
    """Completions from each measured level.

    Attributes:
        levels: Measured levels t >= 1, ascending; the last is T.
        completions: J from each of them, of one proposal.
        calls: Network calls of one completion from each of them.
        sigmas: Noise level of each call, [L, S], NaN after the last.
        coefficients: keep, pull, slope and spread of each call, see `flow.Step`, [L, S, 4].
        start: Noise level at which the completions begin, [L].
        clock: snr = (alpha / sigma)^2 of all points, ascending from 0, [K].
        place: Place in ``clock`` of each call, [L, S]; the call lands at the place of the next.
    """

    levels: list[int]
    completions: list[int]
    calls: list[int]
    sigmas: Tensor
    coefficients: Tensor
    start: Tensor
    clock: Tensor
    place: Tensor

    @property
    def cost(self) -> int:
        """Network calls a proposal."""
        return sum(j * n for j, n in zip(self.completions, self.calls, strict=True))


def make_plan(
    sigmas: Tensor,
    *,
    rollouts: int | Sequence[int] = 1,
    steps: Steps = "auto",
    levels: int | Sequence[int] | None = None,
    posterior: Posterior = "sde2",
) -> Plan:
    """Lays out the completions of `estimate_profile`, which has the same arguments.

    Raises:
        ValueError: If levels, completions or steps are out of range.
    """
    grid = check_grid(sigmas)
    chosen = _levels(levels, len(grid) - 1)
    grids = [[0.0, *grid[1 : t + 1]] for t in chosen]
    if steps != "grid":
        number = _auto(grid) if steps == "auto" else steps
        if number < 1:
            raise ValueError(f"steps must be 'auto', 'grid' or at least 1, got {number}.")
        grids = [posterior_grid(grid[t], number) for t in chosen]
    per_level = [rollouts] * len(chosen) if isinstance(rollouts, int) else list(rollouts)
    if len(per_level) != len(chosen) or min(per_level) < 1:
        raise ValueError(
            f"completions must be a number of at least 1, or one for each of the {len(chosen)} levels, got {rollouts}."
        )
    return _tabulate(chosen, per_level, grids, [posterior_steps(g, posterior) for g in grids])


def check_order(order: float, completions: Sequence[int]) -> None:
    """Checks that an order can be estimated from so many completions.

    Raises:
        ValueError: If the order is not positive, or is nested and a level has one completion only.
    """
    if not order > 0:
        raise ValueError(f"order must be positive, got {order}.")
    if order != 2 and min(completions) < 2:
        raise ValueError(
            f"Order {order:g} needs at least 2 completions a proposal and level, got {min(completions)}: it is a nested "
            "mean, whose bias one completion cannot show. Use order 2, or 8 completions and more."
        )


def _tabulate(levels: list[int], completions: list[int], grids: list[list[float]], rows: list[list[Step]]) -> Plan:
    clock = sorted({_snr(step.sigma) for row in rows for step in row} | {0.0})
    places = {snr: k for k, snr in enumerate(clock)}
    longest = max(map(len, rows))
    noise_levels = torch.full((len(rows), longest), torch.nan, dtype=torch.float64)
    coefficients = torch.zeros(len(rows), longest, 4, dtype=torch.float64)
    place = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        for k, step in enumerate(row):
            noise_levels[i, k] = step.sigma
            coefficients[i, k] = torch.tensor([step.keep, step.pull, step.slope, step.spread], dtype=torch.float64)
            place[i, k] = places[_snr(step.sigma)]
    return Plan(
        levels=levels,
        completions=completions,
        calls=[len(row) for row in rows],
        sigmas=noise_levels,
        coefficients=coefficients,
        start=torch.tensor([g[-1] for g in grids], dtype=torch.float64),
        clock=torch.tensor(clock, dtype=torch.float64),
        place=place,
    )


def _levels(levels: int | Sequence[int] | None, last: int) -> list[int]:
    """Ascending levels from 1 to T; a number spreads that many evenly."""
    if levels is None:
        return list(range(1, last + 1))
    if isinstance(levels, int):
        if not 2 <= levels <= last:
            raise ValueError(f"levels must be 2 to {last}, or a list of levels, got {levels}.")
        return [1 + round(k * (last - 1) / (levels - 1)) for k in range(levels)]
    chosen = sorted(set(levels))
    if not chosen or chosen[0] < 1 or chosen[-1] != last:
        raise ValueError(f"levels must lie in 1 ... {last} and hold {last}, got {list(levels)}.")
    return chosen


def _auto(grid: list[float]) -> int:
    """Most steps for which all levels together cost no more than on the sampler's own grid, T (T + 1) / 2."""
    last = len(grid) - 1
    steps = 1
    while sum(len(posterior_grid(s, steps + 1)) - 1 for s in grid[1:]) <= last * (last + 1) // 2:
        steps += 1
    return steps


def _snr(sigma: float) -> float:
    return ((1 - sigma) / sigma) ** 2
