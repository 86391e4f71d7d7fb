"""Profiles against curves known in closed form, mostly without sampling (see closed_forms.py)."""

import pytest
import torch
from helpers.closed_forms import (
    Membership,
    bump,
    exact_divergence,
    gaussian,
    grid,
    mixture,
    sobol,
    solved_divergence,
    worst,
)

from recast_lightning.credit import estimate_profile
from recast_lightning.credit.plan import make_plan
from recast_lightning.flow.posterior import posterior_grid

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


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_levels", [1, 2, 3, 5, 10, 16, 25, 40])
def test_auto_never_costs_more_than_the_sampler_s_grid(num_levels, shift):
    auto, own = (make_plan(grid(num_levels, shift), steps=steps).cost for steps in ("auto", "grid"))
    assert own == num_levels * (num_levels + 1) // 2
    assert auto <= own
    assert auto > 0.8 * own or num_levels < 5


@pytest.mark.parametrize("steps", [0, -2])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(ValueError, match=f"steps must be 'auto', 'grid' or at least 1, got {steps}"):
        make_plan(grid(4), steps=steps)
