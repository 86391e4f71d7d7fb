"""Flow matching: noising, denoising, and the two ways to roll out from a noise level.

Shape legend: B batch, T number of noise levels; ``...`` is any data shape.

Convention: the levels ``sigmas`` ascend from clean (sigma_0 = 0) to noisy (sigma_T <= 1); samplers walk them downwards.
With alpha = 1 - sigma, x_sigma = alpha x0 + sigma eps and v = eps - x0, hence x0_hat = x_sigma - sigma v.
"""

import math
from collections.abc import Callable
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
    return _integrate(velocity, x, sigmas, index, clock=_log_snr if solver == "dpm2" else None, noise=None)


@torch.no_grad()
def sample_posterior(
    velocity: Velocity,
    x: Tensor,
    sigmas: Tensor,
    level: int,
    *,
    method: Posterior = "sde2",
    noise: Callable[[int], Tensor] | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Draws x0 ~ p(x0 | x_t): the reverse SDE that carries the forward process's own noise, one network call a step.

    ``sde1`` is ancestral sampling (SDE-DPM-Solver++ 1, equal to DDIM with eta = 1): each step draws from
    q(x_s | x_t, x0 = x0_hat). ``sde2`` is SDE-DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095) with the slope of
    x0_hat taken in sigma rather than in lambda: it is finite at both ends, and on a Gaussian with ten equal steps it
    puts the Renyi divergence within 0.005 nats of the truth (0.023 with the slope in lambda, 0.12 with ``sde1``).
    ``ode`` is Euler on the probability-flow ODE, *not* a posterior sample: kept to show what that costs.

    The last step returns x0_hat(x_{sigma_1}), a posterior mean: what is left of p(x0 | x_{sigma_1}) has a variance of
    at most sigma_1^2 / alpha_1^2 on average, and one call of a denoiser says nothing else about it. Choose grids with
    a small sigma_1.

    Args:
        velocity: See `Velocity`.
        x: State x_t at level t = ``level``, [B, ...].
        sigmas: Ascending levels from 0, [T + 1].
        level: t in 1 ... T.
        method: ``sde2``, ``sde1`` or ``ode``.
        noise: ``noise(k) -> [B, ...]``, the standard normal noise of the step that lands on level k (1 <= k < t);
            default: torch's global generator.
        index: Condition of each row, [B]; default 0 ... B - 1.

    Returns:
        x0, [B, ...], in float32 or wider.
    """
    if method not in ("sde2", "sde1", "ode"):
        raise ValueError(f"method must be 'sde2', 'sde1' or 'ode', got {method!r}.")
    if not 1 <= level < len(sigmas):
        raise ValueError(f"level must be in 1 ... {len(sigmas) - 1} (the last of sigmas), got {level}.")
    grid = sigmas[: level + 1]
    if method == "ode":
        return _integrate(velocity, x, grid, index, clock=None, noise=None)
    clock = _sigma if method == "sde2" else None
    return _integrate(velocity, x, grid, index, clock=clock, noise=noise or (lambda _: torch.randn_like(x)))


def _integrate(
    velocity: Velocity,
    x: Tensor,
    sigmas: Tensor,
    index: Tensor | None,
    *,
    clock: Callable[[float], float] | None,
    noise: Callable[[int], Tensor] | None,
) -> Tensor:
    """Multistep exponential integrator; ``clock`` is the variable of the second-order slope, ``noise`` makes it an SDE.

    With h = lambda_t - lambda_s > 0 and e^-h = alpha_s sigma_t / (alpha_t sigma_s), a step from s to t is

        ODE:  x_t = sigma_t / sigma_s x_s + alpha_t (1 - e^-h) D
        SDE:  x_t = sigma_t / sigma_s e^-h x_s + alpha_t (1 - e^-2h) D + sigma_t sqrt(1 - e^-2h) z

    with D = x0_hat_s (first order) or its linear extrapolation to the middle of the step (second order).
    """
    grid = [float(sigma) for sigma in sigmas.double()]
    if grid[0] != 0 or grid[-1] > 1 or any(a >= b for a, b in pairwise(grid)) or len(grid) < 2:
        raise ValueError(f"sigmas must ascend strictly from 0 to at most 1, got {grid}.")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if index is None:
        index = torch.arange(len(x), device=x.device)
    before: Tensor | None = None  # x0_hat of the step before
    for k in range(len(grid) - 1, 0, -1):
        s, t = grid[k], grid[k - 1]
        v = velocity(x, torch.full((len(x),), s, dtype=x.dtype, device=x.device), index)
        x0_hat = velocity_to_x0(x, v.to(x.dtype), s)
        if t == 0:
            return x0_hat
        middle = x0_hat
        if clock is not None and before is not None:
            middle = x0_hat + 0.5 * (clock(t) - clock(s)) / (clock(s) - clock(grid[k + 1])) * (x0_hat - before)
        decay = (1 - s) * t / ((1 - t) * s)  # e^-h; 0 from pure noise
        if noise is None:
            x = t / s * x + (1 - t) * (1 - decay) * middle
        else:
            x = t / s * decay * x + (1 - t) * (1 - decay**2) * middle
            x = x + t * math.sqrt(1 - decay**2) * noise(k - 1).to(x)
        before = x0_hat
    raise AssertionError("unreachable: the grid ends at 0")


def _sigma(sigma: float) -> float:
    """Clock of `sample_posterior`."""
    return sigma


def _log_snr(sigma: float) -> float:
    """Clock of `sample_ode`: half the log signal-to-noise ratio, lambda = ln(alpha / sigma); -inf at sigma = 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf
