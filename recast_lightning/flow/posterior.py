"""Steps down from a noise level to a sample of the posterior p(x0 | x_sigma): a completion of x_sigma.

Levels and steps are plain numbers; `credit.completions` applies them to tensors. alpha = 1 - sigma.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from recast_lightning.flow.noising import half_log_snr

Posterior = Literal["sde2", "sde1", "ode"]


def posterior_grid(sigma: float, steps: int) -> list[float]:
    """Levels of a completion of x_sigma, placed where the posterior needs them, ascending from 0 to ``sigma``.

    The levels are even in theta^(2/3), theta = atan(sigma / alpha), between 0.5 / ``steps`` and ``sigma``. So the last
    call, which returns a mean, is made where nearly nothing is left of the posterior. A completion of pure noise takes
    ``steps`` calls, one from a lower level down to half as many. `benchmarks/posterior.py` compares other placements.

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
    """One network call of a completion: x <- keep x + pull (x0_hat + slope (x0_hat - before)), x0_hat = x - sigma v.

    ``before`` is x0_hat of the call before. An SDE then adds spread (W(t) - W(s)), W a Brownian motion in the clock
    snr = (alpha / sigma)^2. The last call gives x0_hat itself.

    Attributes:
        sigma: Noise level s at which the network is called; the next step's is t, where this one lands.
        keep: Factor of the state.
        pull: Factor of the (extrapolated) clean data.
        slope: How far x0_hat is extrapolated along its last change.
        spread: Factor of the Brownian motion's increment; 0 for an ODE.
    """

    sigma: float
    keep: float = 0.0
    pull: float = 1.0
    slope: float = 0.0
    spread: float = 0.0


def posterior_steps(grid: Sequence[float], method: Posterior = "sde2") -> list[Step]:
    """Steps of a completion from the last level of ``grid`` down to 0.

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

    Raises:
        ValueError: If the method is unknown.
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
                slope = sum(0.25 * (f(t) - f(s)) / (f(s) - f(before)) for f in (half_log_snr, _angle))
            steps.append(Step(s, t / s * decay, (1 - t) * (1 - decay**2), slope, t**2 / (1 - t)))
    return steps


def _angle(sigma: float) -> float:
    """atan(sigma / alpha)^(2/3), from 0 to (pi / 2)^(2/3)."""
    return math.atan2(sigma, 1 - sigma) ** (2 / 3)
