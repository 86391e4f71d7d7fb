"""Noise levels, noising, and the clean data that a velocity points to.

Shape legend: B batch, T noise levels; ``...`` is any data shape.

Convention: the levels ``sigmas`` ascend from clean (sigma_0 = 0) to noisy (sigma_T <= 1); samplers walk them downwards.
With alpha = 1 - sigma, x_sigma = alpha x0 + sigma eps and v = eps - x0, hence x0_hat = x_sigma - sigma v.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``velocity(x [B, ...], sigma [B], index [B]) -> [B, ...]``; ``index`` says which condition each row has."""


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


def check_grid(sigmas: Tensor) -> list[float]:
    """Noise levels as numbers.

    Args:
        sigmas: Levels, [T + 1].

    Raises:
        ValueError: Unless the levels ascend strictly from 0 to at most 1.
    """
    grid = [float(sigma) for sigma in sigmas.double()]
    if grid[0] != 0 or grid[-1] > 1 or any(a >= b for a, b in pairwise(grid)) or len(grid) < 2:
        raise ValueError(f"sigmas must ascend strictly from 0 to at most 1, got {grid}.")
    return grid


def half_log_snr(sigma: float) -> float:
    """Half the logarithm of the signal-to-noise ratio (alpha / sigma)^2, i.e. lambda = ln(alpha / sigma).

    Args:
        sigma: Level in (0, 1]; pure noise, 1, gives -inf.
    """
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf
