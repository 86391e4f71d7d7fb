"""Steps of completions against posteriors known in closed form, without sampling (see closed_forms.py)."""

import dataclasses
import itertools
import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from helpers.closed_forms import (
    F64,
    affine_posterior,
    gaussian,
    grid,
    mixture,
    snr,
)

from recast_lightning.flow.posterior import posterior_grid, posterior_steps

STANDARD, TWO = gaussian(0.0, 1.0), mixture([0.5, 0.5], [-1.0, 1.0], [0.1, 0.1])


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0])
def test_completions_have_the_posterior_s_moments_and_converge_to_them(sigma):
    policy = gaussian([0.4, -1.0], [0.5, 1.5], 2)
    _, means, exact = (value[0] for value in policy.posterior(torch.zeros(1, 2, dtype=F64), sigma))
    exact_gain = (1 - sigma) * policy.variances[0] / policy.noised(sigma).variances[0]
    deviations = []
    for steps in (7, 28, 112):
        gain, offset, variance = affine_posterior(policy, posterior_steps(posterior_grid(sigma, steps)))
        deviation = torch.stack([gain - exact_gain, offset - means[0], variance - exact[0]]).abs()
        deviations.append(float(deviation.max()))
    assert deviations[0] < 0.07
    assert deviations[1] < deviations[0] / 2.5
    assert deviations[2] < deviations[1] / 2.5


def test_the_mean_of_a_completion_is_the_posterior_mean_at_any_number_of_steps():
    """E[x0 | x_t] is a martingale of the true process, and the first call already tells it: no step may bend it."""
    for steps in (2, 5, 9):
        gain, offset, _ = affine_posterior(gaussian(0.3, 1.0), posterior_steps(posterior_grid(1.0, steps)))
        assert float(gain) == pytest.approx(0.0, abs=1e-12)
        assert float(offset) == pytest.approx(0.3, abs=1e-12)


def log_snr(sigma):
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


def slopes(clock, levels):
    """Half the ratio of each step to the one before in some clock; 0 for the first and the last."""
    down = [clock(sigma) for sigma in reversed(levels[1:])]
    middle = [0.5 * (c - b) / (b - a) for a, b, c in zip(down, down[1:], down[2:], strict=False)]
    return [0.0, *middle, 0.0]


@pytest.mark.parametrize("levels", [grid(10, 3.0).tolist(), posterior_grid(1.0, 9)], ids=["grid", "placed"])
def test_sde2_is_the_multistep_sde_solver_of_diffusers_with_a_slope_between_two_clocks(levels):
    """Step by step with the same noise: spread (W(t) - W(s)) is their sigma_t sqrt(1 - e^-2h) z."""
    steps = posterior_steps(levels)
    theirs, angle = slopes(log_snr, levels), slopes(lambda s: math.atan2(s, 1 - s) ** (2 / 3), levels)
    assert [step.slope for step in steps] == pytest.approx([(a + b) / 2 for a, b in zip(theirs, angle, strict=True)])
    steps = [dataclasses.replace(step, slope=slope) for step, slope in zip(steps, theirs, strict=True)]
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="sde-dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        lower_order_final=False,
        euler_at_final=False,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(len(levels) - 1)
    scheduler.sigmas = torch.tensor(levels, dtype=F64).flip(0)
    theirs = ours = torch.randn(6, 1, dtype=F64)
    before = torch.zeros_like(ours)
    for k, (step, time) in enumerate(zip(steps, scheduler.timesteps, strict=True)):
        z = torch.randn(6, 1, dtype=F64)
        theirs = scheduler.step(TWO.velocity(theirs, step.sigma), time, theirs, variance_noise=z).prev_sample.to(F64)
        x0_hat = ours - step.sigma * TWO.velocity(ours, step.sigma)
        brownian = (snr(steps[k + 1].sigma) - snr(step.sigma)) ** 0.5 * z if k + 1 < len(steps) else 0.0
        ours = step.keep * ours + step.pull * (x0_hat + step.slope * (x0_hat - before)) + step.spread * brownian
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        before = x0_hat


def test_sde1_is_the_ancestral_step():
    """One step from s to t draws from the exact q(x_t | x_s, x0 = x0_hat); checked on its two moments."""
    s, t = 0.7, 0.4
    gain, _, variance = affine_posterior(STANDARD, posterior_steps([0.0, t, s], "sde1"))
    x0_hat = (1 - s) / ((1 - s) ** 2 + s**2)
    rest = s**2 - ((1 - s) / (1 - t)) ** 2 * t**2  # Var(x_s | x_t)
    back = (1 - s) / (1 - t) * t**2 / s**2
    last = (1 - t) / ((1 - t) ** 2 + t**2)
    assert float(gain) == pytest.approx(last * ((1 - t) * x0_hat + back * (1 - (1 - s) * x0_hat)))
    assert float(variance) == pytest.approx(last**2 * t**2 * rest / s**2)


@pytest.mark.parametrize("method", ["sde2", "sde1", "ode"])
def test_a_point_mass_is_found_exactly_with_one_call_a_step(method):
    steps = posterior_steps(posterior_grid(1.0, 6), method)
    gain, offset, variance = affine_posterior(gaussian(0.7, 0.0), steps)
    assert [float(gain), float(offset), float(variance)] == pytest.approx([0.0, 0.7, 0.0], abs=1e-12)
    assert [step.sigma for step in steps] == posterior_grid(1.0, 6)[:0:-1]


@pytest.mark.parametrize("steps", [2, 3, 7, 20])
def test_levels_of_a_completion_ascend_from_zero_to_its_start(steps):
    last, calls = 0.5 / steps, []
    for sigma in [0.5 * last, last, *torch.linspace(1.05 * last, 1.0, 30, dtype=F64).tolist()]:
        levels = posterior_grid(sigma, steps)
        assert (levels[0], levels[-1]) == (0.0, sigma)
        assert all(a < b for a, b in itertools.pairwise(levels))
        assert levels[1] == pytest.approx(min(sigma, last))
        calls.append(len(levels) - 1)
    assert calls == sorted(calls)
    assert calls[:2] == [1, 1]
    assert calls[-1] == steps


def test_more_steps_never_make_fewer_calls():
    for sigma in torch.linspace(0.02, 1, 25, dtype=F64).tolist():
        calls = [len(posterior_grid(sigma, steps)) for steps in range(1, 40)]
        assert calls == sorted(calls)
    assert posterior_grid(0.6, 1) == [0.0, 0.6]


def test_an_unknown_sampler_is_refused():
    with pytest.raises(ValueError, match="posterior must be 'sde2', 'sde1' or 'ode', got 'sde3'"):
        posterior_steps([0.0, 0.5], "sde3")
