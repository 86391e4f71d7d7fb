"""The credit matrix W: how much each reward counts at each noise level (ReCAST, arXiv 2609.13425).

Shape legend: R rewards, T noise levels; column t - 1 is level t.
"""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recast_lightning.credit.artefact import load_artefact, save_artefact
from recast_lightning.credit.gains import monotone_divergence, normalized_gains, shrunk_gains
from recast_lightning.credit.profile import Profile
from recast_lightning.credit.sinkhorn import project

_KIND = "recast credit matrix"
_FORMAT = 2
_REPLICATES = 200  # for the error bars of W
_OPTIONAL = {"sigmas", "weights_stderr", "normalized_stderr"}  # fields that a file may lack

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
        iterations: Of the projection; 0 where there was nothing to do.
        sigmas: Ascending noise levels, [T + 1], if known.
        weights_stderr: Standard errors of ``weights``, [R, T], if the profile had any.
        normalized_stderr: Standard errors of ``normalized``, [R, T], likewise.
    """

    weights: Tensor
    budgets: dict[str, float]
    method: Method
    gains: Tensor
    normalized: Tensor
    temperature: float = 1.0
    iterations: int = 0
    sigmas: Tensor | None = None
    weights_stderr: Tensor | None = None
    normalized_stderr: Tensor | None = None

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
            gains_stderr: Standard errors of the gains, [R, T], or their covariances over levels, [R, T, T].
            shrinkage: With error bars, ``auto`` makes the rows monotone and pulls noisy ones to flat (`shrunk_gains`);
                ``none`` takes the gains as they are (the paper).
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
        normalized = normalized.cpu()
        weights, iterations = _weights(normalized, _shares(budgets, num_rewards), method, temperature)
        gains = gains.detach().cpu()
        return cls(weights, dict(budgets), method, gains, normalized, temperature, iterations, sigmas)

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
        """`from_gains` on the budgeted rewards of a profile, with error bars from its bootstrap replicates.

        With ``shrinkage="none"`` the gains are the monotone ones, which is all that is done to them.
        """
        rows = profile.rows(list(budgets))
        noise, gains = profile.gains_covariance[rows], profile.gains[rows]
        matrix = cls.from_gains(
            profile.monotone_gains[rows] if shrinkage == "none" else gains,
            budgets,
            method,
            sigmas=profile.sigmas,
            gains_stderr=noise,
            shrinkage=shrinkage,
            temperature=temperature,
        )
        if len(profile.replicates) < 2:
            return matrix
        again = profile.replicates[:_REPLICATES, rows]
        every, count = again.flatten(0, 1), len(again)  # rows are shaped one by one
        if shrinkage == "none":
            monotone = monotone_divergence(every, profile.stderr[rows].repeat(count, 1))
            normalized = normalized_gains((-monotone.diff(dim=1)).clamp(min=0))
        else:
            normalized = shrunk_gains(-every.diff(dim=1), noise.repeat(count, 1, 1))
        normalized, shares = normalized.view(count, len(rows), -1), _shares(budgets, len(rows))
        weights = torch.stack([_weights(shape, shares, method, temperature)[0] for shape in normalized])
        weights_stderr = (weights - weights[0]).std(0)  # exactly 0 where all are equal
        return replace(matrix, weights_stderr=weights_stderr, normalized_stderr=normalized.std(0))

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
        header = {
            name: value for name, value in vars(self).items() if not isinstance(value, Tensor) and value is not None
        }
        rows, columns = self.residuals
        header |= {"format": _FORMAT, "row_residual": rows, "column_residual": columns}
        return save_artefact(path, _KIND, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> "CreditMatrix":
        """Reads what `save` wrote.

        Raises:
            ValueError: If the file is damaged, something else, or of another format.
        """
        tensors, header = load_artefact(path, _KIND)
        values = {**tensors, **header}
        derived = {"format", "row_residual", "column_residual"}
        names = {f.name for f in fields(cls)} | derived
        if header.get("format") != _FORMAT or not names - _OPTIONAL <= values.keys() <= names:
            raise ValueError(f"The W in {str(path)!r} is of another version of recast_lightning: build it anew.")
        return cls(**{name: value for name, value in values.items() if name not in derived})


def _weights(normalized: Tensor, shares: Tensor, method: Method, temperature: float) -> tuple[Tensor, int]:
    """W of normalised gains [R, T] and shares [R], and the iterations of its projection."""
    num_levels = normalized.shape[1]
    if method == "static" or (normalized == 1).all():
        return (shares / num_levels).unsqueeze(1).repeat(1, num_levels), 0
    kernel = normalized / temperature
    if not kernel.isfinite().all():
        raise ValueError(f"temperature {temperature:g} is too small: gains over it leave float64. Take 0.001 or more.")
    if method == "unprojected":
        return shares.unsqueeze(1) * kernel.softmax(1), 0
    return project(kernel, shares, torch.full((num_levels,), 1 / num_levels, dtype=torch.float64))


def _shares(budgets: dict[str, float], num_rewards: int) -> Tensor:
    """lambda_i = budget_i / sum of budgets, [R], float64."""
    if len(budgets) != num_rewards:
        raise ValueError(f"budgets must name the {num_rewards} rows of gains, got {', '.join(budgets) or 'none'}.")
    for name, budget in budgets.items():
        if not 0 <= budget < math.inf:
            raise ValueError(f"The budget of {name!r} must be non-negative and finite, got {budget}.")
    if not any(budgets.values()):
        given = f"0 for each of {', '.join(budgets)}" if budgets else "none"
        raise ValueError(f"At least one budget must be positive, got {given}.")
    exponent = math.frexp(max(budgets.values()))[1]  # a power of two, which rounds nothing and keeps the sum finite
    values = torch.tensor([math.ldexp(budget, -exponent) for budget in budgets.values()], dtype=torch.float64)
    return values / values.sum()
