"""The credit matrix W: how much each reward counts at each noise level (ReCAST, arXiv 2609.13425).

Shape legend: R rewards, T noise levels; column t - 1 is level t.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recast_lightning.credit.artefact import load_artefact, save_artefact
from recast_lightning.credit.gains import normalized_gains, shrunk_gains
from recast_lightning.credit.profile import Profile
from recast_lightning.credit.sinkhorn import sinkhorn_projection

_KIND = "recast credit matrix"

Method = Literal["recast", "static", "unprojected"]
Shrinkage = Literal["auto", "none"]


@dataclass(frozen=True, eq=False)
class CreditMatrix:
    """Credit of R rewards over T levels; budgets say how much each reward counts, gains say when.

    Budgets are shares: lambda_i = budget_i / sum of budgets, so that W sums to 1. Row i of W sums to lambda_i and, but
    for ``unprojected``, every column to 1 / T. Training at level t uses r_t = sum_i T W_i,t r_i (`level_weights`)
    where static weighting uses sum_i lambda_i r_i; a common scale of all budgets would cancel in the advantages
    anyway.

    Attributes:
        weights: W, [R, T], float64.
        budgets: As given, in row order.
        method: ``recast`` (projected), ``static`` (W = lambda_i / T) or ``unprojected`` (kernel rows scaled to
            lambda_i).
        gains: dD as given, [R, T].
        normalized: g~ after shrinkage, what the kernel exp(g~ / tau) was made of, [R, T].
        temperature: tau.
        sigmas: Ascending noise levels, [T + 1], if known.
    """

    weights: Tensor
    budgets: dict[str, float]
    method: Method
    gains: Tensor
    normalized: Tensor
    temperature: float = 1.0
    sigmas: Tensor | None = None

    @classmethod
    def from_gains(
        cls,
        gains: Tensor,
        budgets: dict[str, float],
        method: Method = "recast",
        *,
        sigmas: Tensor | None = None,
        gains_stderr: Tensor | None = None,
        shrinkage: Shrinkage = "auto",
        temperature: float = 1.0,
    ) -> "CreditMatrix":
        """Builds W from the shape of the gains and the budgets.

        Args:
            gains: dD, rows in the order of ``budgets``, [R, T].
            budgets: Name of each reward to its budget; non-negative, not all zero.
            method: See the class.
            sigmas: Ascending noise levels to keep with W, [T + 1].
            gains_stderr: Standard errors of the gains, [R, T].
            shrinkage: With error bars, ``auto`` makes the rows monotone and pulls noisy ones to flat (`shrunk_gains`).
            temperature: tau > 0; large is static.
        """
        if method not in ("recast", "static", "unprojected"):
            raise ValueError(f"method must be 'recast', 'static' or 'unprojected', got {method!r}.")
        if shrinkage not in ("auto", "none"):
            raise ValueError(f"shrinkage must be 'auto' or 'none', got {shrinkage!r}.")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}.")
        if shrinkage == "none" or gains_stderr is None:
            normalized = normalized_gains(gains)
        else:
            normalized = shrunk_gains(gains, gains_stderr)
        num_rewards, num_levels = gains.shape
        if sigmas is not None and sigmas.shape != (num_levels + 1,):
            raise ValueError(f"sigmas must hold {num_levels + 1} levels for gains of {num_levels}, got {len(sigmas)}.")
        shares = _shares(budgets, num_rewards)
        kernel = normalized.cpu() / temperature
        if method == "static" or (normalized == 1).all():
            weights = (shares / num_levels).unsqueeze(1).repeat(1, num_levels)
        elif method == "unprojected":
            weights = shares.unsqueeze(1) * kernel.softmax(1)
        else:
            columns = torch.full((num_levels,), 1 / num_levels, dtype=torch.float64)
            weights = sinkhorn_projection(kernel, shares, columns)
        return cls(weights, dict(budgets), method, gains.detach().cpu(), normalized.cpu(), temperature, sigmas)

    @classmethod
    def from_profile(
        cls,
        profile: Profile,
        budgets: dict[str, float],
        method: Method = "recast",
        *,
        shrinkage: Shrinkage = "auto",
        temperature: float = 1.0,
    ) -> "CreditMatrix":
        """`from_gains` on the monotone gains and error bars of the budgeted rewards of a profile."""
        rows = profile.rows(list(budgets))
        return cls.from_gains(
            profile.monotone_gains[rows],
            budgets,
            method,
            sigmas=profile.sigmas,
            gains_stderr=profile.gains_stderr[rows],
            shrinkage=shrinkage,
            temperature=temperature,
        )

    @property
    def rewards(self) -> list[str]:
        """Names, in row order."""
        return list(self.budgets)

    @property
    def level_weights(self) -> Tensor:
        """T W: what multiplies each reward at each level, [R, T]; columns sum to 1 (but for ``unprojected``)."""
        return self.weights * self.weights.shape[1]

    @property
    def residuals(self) -> tuple[float, float]:
        """Largest error of a row sum (budgets) and of a column sum (levels)."""
        num_rewards, num_levels = self.weights.shape
        rows = self.weights.sum(1) - _shares(self.budgets, num_rewards)
        columns = self.weights.sum(0) - 1 / num_levels
        return float(rows.abs().max()), float(columns.abs().max())

    def save(self, path: str | Path) -> Path:
        """Writes ``path``.safetensors, exact, and ``path``.json, to read; returns the former."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        header = {"budgets": self.budgets, "method": self.method, "temperature": self.temperature}
        return save_artefact(path, _KIND, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> "CreditMatrix":
        """Reads what `save` wrote; ValueError if the file is damaged or something else."""
        tensors, header = load_artefact(path, _KIND)
        return cls(**tensors, **header)


def _shares(budgets: dict[str, float], num_rewards: int) -> Tensor:
    """lambda_i = budget_i / sum of budgets, [R], float64."""
    if len(budgets) != num_rewards:
        raise ValueError(f"budgets must name the {num_rewards} rows of gains, got {', '.join(budgets) or 'none'}.")
    for name, budget in budgets.items():
        if not 0 <= budget < math.inf:
            raise ValueError(f"The budget of {name!r} must be non-negative and finite, got {budget}.")
    values = torch.tensor(list(budgets.values()), dtype=torch.float64)
    if not values.any():
        raise ValueError(f"At least one budget must be positive, got 0 for each of {', '.join(budgets)}.")
    return values / values.sum()
