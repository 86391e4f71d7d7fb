"""Flow matching: noising, denoising, and the two ways down from a noise level.

Shape legend: B batch, T number of noise levels; ``...`` is any data shape.

Convention: the levels ``sigmas`` ascend from clean (sigma_0 = 0) to noisy (sigma_T <= 1); samplers walk them downwards.
With alpha = 1 - sigma, x_sigma = alpha x0 + sigma eps and v = eps - x0, hence x0_hat = x_sigma - sigma v.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``velocity(x [B, ...], sigma [B], index [B]) -> [B, ...]``; ``index`` says which condition each row has."""

Solver = Literal["euler", "dpm2"]
Posterior = Literal["sde2", "sde1", "ode"]


def _like(sigma: Tensor | float, x: Tensor) -> Tensor | float:
    """Shapes sigma [B] for broadcasting against x [B, ...], in x's precision or float32; leaves scalars alone."""
    if not isinstance(sigma, Tensor) or sigma.ndim == 0:
        return sigma
    return sigma.view(-1, *[1] * (x.ndim - 1)).to(torch.promote_types(x.dtype, torch.float32))


def noise_to(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """Noises clean data to level sigma: x_sigma = (1 - sigma) x0 + sigma eps.

    Args:
        x0: Clean data, [B, ...].
        noise: Standard normal noise, [B, ...].
        sigma: Level in [0, 1], [B] or a scalar.
    """
    sigma = _like(sigma, x0)
    return (1 - sigma) * x0 + sigma * noise


def velocity_to_x0(x_sigma: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """Clean data that a velocity points to: x0_hat = x_sigma - sigma v.

    Args:
        x_sigma: Noisy data, [B, ...].
        velocity: Predicted eps - x0, [B, ...].
        sigma: Level in [0, 1], [B] or a scalar.
    """
    return x_sigma - _like(sigma, x_sigma) * velocity


@torch.no_grad()
def sample_ode(
    velocity: Velocity, x: Tensor, sigmas: Tensor, *, solver: Solver = "euler", index: Tensor | None = None
) -> Tensor:
    """Follows the probability-flow ODE from sigma_T down to 0, one network call a step.

    ``dpm2`` is DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095, Algorithm 2) as DiffusionNFT (arXiv 2509.16117)
    samples with it: the first and the last step are of first order (DDIM, which for flows is Euler), the others
    extrapolate x0_hat in lambda = ln(alpha / sigma). Where the step before started at sigma = 1 (lambda = -inf) the
    extrapolation vanishes.

    Args:
        velocity: See `Velocity`.
        x: State at sigma_T, [B, ...].
        sigmas: Ascending levels from 0, [T + 1].
        solver: ``euler`` or ``dpm2``.
        index: Condition of each row, [B]; default 0 ... B - 1.

    Returns:
        x0, [B, ...], in float32 or wider.
    """
    if solver not in ("euler", "dpm2"):
        raise ValueError(f"solver must be 'euler' or 'dpm2', got {solver!r}.")
    grid = check_grid(sigmas)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if index is None:
        index = torch.arange(len(x), device=x.device)
    before: Tensor | None = None  # x0_hat of the step before
    for k in range(len(grid) - 1, 0, -1):
        s, t = grid[k], grid[k - 1]
        v = velocity(x, torch.full((len(x),), s, dtype=x.dtype, device=x.device), index)
        x0_hat = velocity_to_x0(x, v.to(x.dtype), s)
        if t == 0:
            break
        middle = x0_hat
        if solver == "dpm2" and before is not None:
            ratio = (_log_snr(t) - _log_snr(s)) / (_log_snr(s) - _log_snr(grid[k + 1]))
            middle = x0_hat + 0.5 * ratio * (x0_hat - before)
        decay = (1 - s) * t / ((1 - t) * s)  # e^-h; 0 from pure noise
        x = t / s * x + (1 - t) * (1 - decay) * middle
        before = x0_hat
    return x0_hat


def posterior_grid(sigma: float, steps: int) -> list[float]:
    """Levels of a rollout from p(x0 | x_sigma), placed where the posterior needs them, ascending from 0 to ``sigma``.

    They are even in theta^(2/3), theta = atan(sigma / alpha), between ``sigma`` and 0.5 / ``steps``. So the last call,
    which returns a mean, is made where nearly nothing is left of the posterior. ``steps`` calls are made from pure
    noise, and down to half as many from below. `benchmarks/posterior.py` compares this with other placements.

    Args:
        sigma: Level of the noisy state, in (0, 1].
        steps: Network calls from pure noise, at least 1.
    """
    last = 0.5 / steps
    if steps < 2 or sigma <= 1.01 * last:
        return [0.0, sigma]
    low, high, top = map(_angle, (last, sigma, 1.0))
    calls = 1 + max(1, round((steps - 1) * 0.5 * (1 + (high - low) / (top - low))))
    angles = [(low + (high - low) * k / (calls - 1)) ** 1.5 for k in range(calls - 1)]
    return [0.0, *(math.sin(a) / (math.sin(a) + math.cos(a)) for a in angles), sigma]


@dataclass(frozen=True)
class Step:
    """One network call of a rollout, with x0_hat = x - sigma v: x <- keep x + pull (x0_hat + slope (x0_hat - before)).

    ``before`` is x0_hat of the call before. An SDE then adds spread (W(t) - W(s)), W a Brownian motion in the clock
    snr = (alpha / sigma)^2. The last call gives x0_hat itself.
    """

    sigma: float
    keep: float = 0.0
    pull: float = 1.0
    slope: float = 0.0
    spread: float = 0.0


def posterior_steps(grid: Sequence[float], method: Posterior = "sde2") -> list[Step]:
    """Steps of a rollout from the last of ``grid`` down to 0.

    In y = (alpha / sigma^2) x and the clock snr = (alpha / sigma)^2, noising is y = snr x0 + W(snr), and x0 given y has
    the law of dy = E[x0 | y] dsnr + dW run on to snr = infinity (stochastic localization; docs/credit.md, (7), (8)).
    A step from s to t, with e^-h = alpha_s sigma_t / (alpha_t sigma_s), solves it for a given x0_hat:

        ODE:  x_t = sigma_t / sigma_s x_s + alpha_t (1 - e^-h) D
        SDE:  x_t = sigma_t / sigma_s e^-h x_s + alpha_t (1 - e^-2h) D + sigma_t^2 / alpha_t (W(t) - W(s))

    ``sde1`` takes D = x0_hat_s: ancestral sampling (SDE-DPM-Solver++ 1, equal to DDIM with eta = 1). ``sde2`` takes its
    linear extrapolation to the middle of the step, as SDE-DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095), whose
    slope in lambda = ln(alpha / sigma) is averaged with that in theta^(2/3): the one errs on policies whose spread is
    not 1, the other on narrow ones. ``ode`` is first order and *not* a posterior sample: kept to show what that costs.

    Args:
        grid: Ascending levels from 0 to at most 1.
        method: ``sde2``, ``sde1`` or ``ode``.
    """
    if method not in ("sde2", "sde1", "ode"):
        raise ValueError(f"posterior must be 'sde2', 'sde1' or 'ode', got {method!r}.")
    steps = []
    for k in range(len(grid) - 1, 0, -1):
        s, t = grid[k], grid[k - 1]
        decay = (1 - s) * t / ((1 - t) * s)  # e^-h; 0 from pure noise
        if t == 0:
            steps.append(Step(s))
        elif method == "ode":
            steps.append(Step(s, t / s, (1 - t) * (1 - decay)))
        else:
            slope = 0.0
            if method == "sde2" and k + 1 < len(grid):
                before = grid[k + 1]
                slope = sum(0.25 * (f(t) - f(s)) / (f(s) - f(before)) for f in (_log_snr, _angle))
            steps.append(Step(s, t / s * decay, (1 - t) * (1 - decay**2), slope, t**2 / (1 - t)))
    return steps


def check_grid(sigmas: Tensor) -> list[float]:
    """The levels as numbers; raises ValueError unless they ascend strictly from 0 to at most 1."""
    grid = [float(sigma) for sigma in sigmas.double()]
    if grid[0] != 0 or grid[-1] > 1 or any(a >= b for a, b in pairwise(grid)) or len(grid) < 2:
        raise ValueError(f"sigmas must ascend strictly from 0 to at most 1, got {grid}.")
    return grid


def _log_snr(sigma: float) -> float:
    """Half the log signal-to-noise ratio, lambda = ln(alpha / sigma); -inf at sigma = 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


def _angle(sigma: float) -> float:
    """atan(sigma / alpha)^(2/3), from 0 to (pi / 2)^(2/3)."""
    return math.atan2(sigma, 1 - sigma) ** (2 / 3)
