"""Whether two profiles say the same: two proposal sources, two seeds, two policies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recast_lightning.credit.matrix import CreditMatrix
from recast_lightning.credit.profile import Profile


@dataclass(frozen=True)
class Agreement:
    """How two profiles agree on one reward.

    Attributes:
        correlation: Pearson's, of the monotone gains over levels; NaN if one is constant.
        totals: D_0 - D_T of both, in nats.
        flat: Whether its gains cannot be told from flat, in each.
        moved: Share of the reward's budget that lies at other levels in the W of the second, with uniform budgets, 0 to 1.
    """

    correlation: float
    totals: tuple[float, float]
    flat: tuple[bool, bool]
    moved: float


def compare_profiles(a: Profile, b: Profile) -> dict[str, Agreement]:
    """Agreement of two profiles on each reward that both measured.

    Raises:
        ValueError: If they share no reward, or are of different levels.
    """
    names = [name for name in a.rewards if name in b.rewards]
    if not names:
        raise ValueError(f"The profiles share no reward: {', '.join(a.rewards)} and {', '.join(b.rewards)}.")
    if len(a.sigmas) != len(b.sigmas) or (a.sigmas.double() - b.sigmas.double()).abs().max() > 1e-4:
        raise ValueError(
            f"The profiles are of different noise levels, {_levels(a)} and {_levels(b)}: measure both with one sampler."
        )
    rows = [p.rows(names) for p in (a, b)]
    gains = [p.monotone_gains[row] for p, row in zip((a, b), rows, strict=True)]
    totals = [p.totals[0][row].tolist() for p, row in zip((a, b), rows, strict=True)]
    flat = [p.flat for p in (a, b)]
    weights = [
        CreditMatrix.from_gains(p.gains[row], dict.fromkeys(names, 1.0), gains_stderr=p.gains_covariance[row]).weights
        * len(names)
        for p, row in zip((a, b), rows, strict=True)
    ]
    moved = ((weights[0] - weights[1]).abs().sum(1) / 2).tolist()
    return {
        name: Agreement(
            _pearson(gains[0][i], gains[1][i]),
            (totals[0][i], totals[1][i]),
            (name in flat[0], name in flat[1]),
            moved[i],
        )
        for i, name in enumerate(names)
    }


def _levels(profile: Profile) -> str:
    return f"{len(profile.sigmas) - 1} from {float(profile.sigmas[1]):.4f} to {float(profile.sigmas[-1]):.4f}"


def _pearson(x: Tensor, y: Tensor) -> float:
    centred = [gains - gains.mean() for gains in (x, y)]
    if any(
        c.norm() <= 1e-9 * gains.norm() for c, gains in zip(centred, (x, y), strict=True)
    ):  # constant but for rounding
        return torch.nan
    return float(centred[0] @ centred[1] / (centred[0].norm() * centred[1].norm()))
