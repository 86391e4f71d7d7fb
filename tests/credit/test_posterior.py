"""Completions of a profile against posteriors known in closed form, mostly without sampling (see closed_forms.py)."""

import dataclasses
import itertools
import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from helpers.closed_forms import (
    F64,
    Membership,
    affine_posterior,
    bump,
    exact_divergence,
    gaussian,
    grid,
    mixture,
    snr,
    sobol,
    solved_divergence,
    worst,
)

from recast_lightning.credit import estimate_profile
from recast_lightning.credit.plan import make_plan
from recast_lightning.flow.posterior import posterior_grid, posterior_steps

STANDARD, TWO = gaussian(0.0, 1.0), mixture([0.5, 0.5], [-1.0, 1.0], [0.1, 0.1])
REWARDS = {"near": bump(2.0, 1.0), "sharp": bump(1.5, 0.5)}


def auto_grids(sigmas):
    """The grids that ``steps="auto"`` stands for, read off the plan."""
    plan = make_plan(sigmas, steps="auto")
    return [[0.0, *row[:n].flip(0).tolist()] for row, n in zip(plan.sigmas, plan.calls, strict=True)]


def own_grids(sigmas):
    return [sigmas[: t + 1].tolist() for t in range(1, len(sigmas))]


def errors(policy, reward, sigmas, order, method="sde2", grids=auto_grids):
    exact = exact_divergence(policy, reward, sigmas, order)
    return worst(solved_divergence(policy, reward, sigmas, order, grids(sigmas), method), exact)


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("order", [1, 1.5, 2])
@pytest.mark.parametrize("num_levels", [10, 16, 25])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_at_the_paper_s_cost_the_curve_is_right_to_two_hundredths(num_levels, shift, order, reward):
    divergence, gain = errors(STANDARD, REWARDS[reward], grid(num_levels, shift), order)
    assert divergence <= 0.02
    assert gain <= 0.015


@pytest.mark.parametrize(("variance", "allowed"), [(0.05, 0.12), (0.25, 0.035), (4.0, 0.125)])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_policies_of_another_scale_are_measured_less_exactly(variance, allowed, shift):
    """The placement is made for data of variance 1. Errors as measured, of a curve that falls by 0.6 to 0.8 nats."""
    reward = bump(2 * variance**0.5, variance)
    assert max(errors(gaussian(0.0, variance), reward, grid(10, shift), order)[0] for order in (1, 2)) < allowed
    assert errors(gaussian(0.0, variance), reward, grid(40, shift), 2)[0] < 0.025


def test_a_reward_of_three_of_64_coordinates():
    """Scales 0.25 to 4 in one latent, and one of them each; the other 61 have no part in the reward."""
    variances, width, center = torch.logspace(-0.6, 0.6, 64), torch.full((64,), torch.inf), torch.zeros(64)
    for k in (8, 32, 56):
        width[k], center[k] = 3 * variances[k], 1.5 * variances[k] ** 0.5
    policy, reward = gaussian(0.0, variances, 64), bump(center, width, 64)
    exact = exact_divergence(policy, reward, grid(10), 2)
    assert float(exact[0] - exact[-1]) > 0.25
    assert errors(policy, reward, grid(10), 2)[0] < 0.05
    assert errors(policy, reward, grid(25), 2)[0] < 0.02


def test_a_reward_of_all_coordinates_adds_up_their_errors():
    """r = exp(-|x - c|^2 / 16) in 64 dimensions tells posterior variances that are off by a few hundredths. It is hard."""
    reward = bump(0.25, 8.0, 64)
    coarse, fine = (errors(gaussian(0.0, 1.0, 64), reward, grid(n), 2)[0] for n in (10, 25))
    assert 0.1 < coarse < 0.25
    assert fine < 0.17


@pytest.mark.parametrize("num_levels", [10, 25])
def test_why_a_second_order_sde_and_why_not_the_sampler_s_grid(num_levels):
    ode, sde1, sde2 = (
        errors(STANDARD, REWARDS["near"], grid(num_levels), 2, method, own_grids)[0]
        for method in ("ode", "sde1", "sde2")
    )
    auto = errors(STANDARD, REWARDS["near"], grid(num_levels), 2)[0]
    assert ode > 0.14
    assert sde1 > 3 * sde2
    assert auto < 0.02
    shifted = grid(num_levels, 3.0)  # whose last step is long
    own = errors(STANDARD, REWARDS["sharp"], shifted, 1, grids=own_grids)[0]
    assert own > 1.3 * errors(STANDARD, REWARDS["sharp"], shifted, 1)[0]


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


def test_estimate_profile_makes_the_completions_of_the_closed_form():
    """The sampled curve, on the same steps, meets the one computed without noise; the sampler's own law is tested so."""
    policy, reward, sigmas = STANDARD, REWARDS["near"], grid(6, 3.0)
    proposals = reward.positive(policy).sample(sobol(2048, 2, seed=1))
    profile = estimate_profile(
        policy.velocity, proposals, {"bump": reward}, sigmas, steps=3, generator=torch.Generator().manual_seed(0),
        batch_size=4096,
    )  # fmt: skip
    grids = [posterior_grid(sigma, 3) for sigma in sigmas[1:].tolist()]
    solved = solved_divergence(policy, reward, sigmas, 2, grids, "sde2")
    exact = exact_divergence(policy, reward, sigmas, 2)
    pull = (profile.divergence[0] - solved).abs() / profile.stderr[0].clamp(min=1e-3)
    assert float(pull.max()) < 4
    assert worst(solved, exact)[0] > 4 * float(profile.stderr[0].max())  # it can tell: three steps are too few


@pytest.mark.parametrize("reward", [bump(1.0, 0.3), Membership(TWO, 1)], ids=["bump", "membership"])
def test_two_modes_are_found_by_the_sde_and_not_by_the_ode(reward):
    sigmas = grid(10)
    exact = exact_divergence(TWO, reward, sigmas, 2)
    proposals = reward.positive(TWO).sample(sobol(1024, 2, seed=3))

    def measured(posterior, steps):
        profile = estimate_profile(
            TWO.velocity, proposals, {"reward": reward}, sigmas, rollouts=2, posterior=posterior, steps=steps,
            generator=torch.Generator().manual_seed(1), batch_size=4096,
        )  # fmt: skip
        return profile.divergence[0], profile.stderr[0]

    ours, stderr = measured("sde2", "auto")
    assert float(stderr.max()) < 0.03
    assert bool(((ours - exact).abs() < 0.03 + 3 * stderr).all())
    paper, _ = measured("ode", "grid")
    assert worst(paper, exact)[0] > 0.12


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


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_levels", [1, 2, 3, 5, 10, 16, 25, 40])
def test_auto_never_costs_more_than_the_sampler_s_grid(num_levels, shift):
    auto, own = (make_plan(grid(num_levels, shift), steps=steps).cost for steps in ("auto", "grid"))
    assert own == num_levels * (num_levels + 1) // 2
    assert auto <= own
    assert auto > 0.8 * own or num_levels < 5


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ValueError, match="posterior must be 'sde2', 'sde1' or 'ode', got 'sde3'"):
        posterior_steps([0.0, 0.5], "sde3")
    for steps in (0, -2):
        with pytest.raises(ValueError, match=f"steps must be 'auto', 'grid' or at least 1, got {steps}"):
            make_plan(grid(4), steps=steps)
