"""Solvers of the probability-flow ODE, from noise to data.

Shape legend: B batch, T noise levels; ``...`` is any data shape.
"""

from typing import Literal

import torch
from torch import Tensor

from recast_lightning.flow.noising import Velocity, check_grid, half_log_snr, velocity_to_x0

Solver = Literal["euler", "dpm2"]


@torch.no_grad()
def sample_ode(
    velocity: Velocity, x: Tensor, sigmas: Tensor, *, solver: Solver = "euler", index: Tensor | None = None
) -> Tensor:
    """Follows the probability-flow ODE from sigma_T down to 0, one network call a step.

    ``dpm2`` is DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095, Algorithm 2) as DiffusionNFT (arXiv 2509.16117)
    samples with it: the first and the last step are of first order (DDIM, which for flows is Euler), the others
    extrapolate x0_hat in lambda = ln(alpha / sigma). The extrapolation vanishes where the step before started at
    sigma = 1 (lambda = -inf).

    Args:
        velocity: See `Velocity`.
        x: State at sigma_T, [B, ...].
        sigmas: Ascending levels from 0, [T + 1].
        solver: ``euler`` or ``dpm2``.
        index: Condition of each row, [B]; default 0 ... B - 1.

    Returns:
        x0, [B, ...], in float32 or wider.

    Raises:
        ValueError: If the solver is unknown, or the levels do not ascend strictly from 0 to at most 1.
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
            ratio = (half_log_snr(t) - half_log_snr(s)) / (half_log_snr(s) - half_log_snr(grid[k + 1]))
            middle = x0_hat + 0.5 * ratio * (x0_hat - before)
        decay = (1 - s) * t / ((1 - t) * s)  # e^-h; 0 from pure noise
        x = t / s * x + (1 - t) * (1 - decay) * middle
        before = x0_hat
    return x0_hat
