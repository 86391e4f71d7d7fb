import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from recast_lightning.flow import noise_to, sample_ode, sample_posterior, velocity_to_x0


def grid(num_levels, shift=1.0):
    u = torch.linspace(0, 1, num_levels + 1, dtype=torch.float64)
    return shift * u / (1 + (shift - 1) * u)


def gaussian_velocity(x, sigma, index):
    """Policy N(0, 1): E[x0 | x_sigma] = alpha x / (alpha^2 + sigma^2)."""
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    return (x - x * (1 - sigma) / ((1 - sigma) ** 2 + sigma**2)) / sigma


def curved_velocity(x, sigma, index):
    """Not a policy's: anything smooth and nonlinear, to compare solvers step by step."""
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    return torch.sin(2 * x + 3 * sigma) + x * sigma


def posterior_moments(method, sigmas, level):
    """Linear policy: x0 = a x_t + noise of variance b. Read a and b off unit impulses, no sampling."""
    x = torch.zeros(level, 1, dtype=torch.float64)
    x[0] = 1
    noise = {k: torch.zeros_like(x).index_fill_(0, torch.tensor(k), 1.0) for k in range(1, level)}
    out = sample_posterior(gaussian_velocity, x, sigmas, level, method=method, noise=noise.__getitem__)
    return float(out[0]), float(out[1:].square().sum())


def log_posterior_reward(a, b, sigma, *, center, width):
    """log E[r(a x_t + N(0, b))] at pi+ for r(x) = exp(-(x - center)^2 / (2 width)) and pi = N(0, 1)."""
    mean = a * (1 - sigma) * center / (1 + width)
    variance = a**2 * ((1 - sigma) ** 2 * width / (1 + width) + sigma**2) + b
    return 0.5 * math.log(width / (width + variance)) - (mean - center) ** 2 / (2 * (width + variance))


def worst_divergence_error(method, sigmas, **reward):
    errors = []
    for level in range(1, len(sigmas)):
        sigma = float(sigmas[level])
        total = (1 - sigma) ** 2 + sigma**2
        exact = log_posterior_reward((1 - sigma) / total, sigma**2 / total, sigma, **reward)
        errors.append(abs(log_posterior_reward(*posterior_moments(method, sigmas, level), sigma, **reward) - exact))
    return max(errors)


@pytest.mark.parametrize("sigma", [torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64), 0.7])
def test_noising_and_denoising_are_inverse(sigma):
    x0, noise = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    x_sigma = noise_to(x0, noise, sigma)
    torch.testing.assert_close(velocity_to_x0(x_sigma, noise - x0, sigma), x0)
    by_hand = torch.stack([(1 - s) * x0[i] + s * noise[i] for i, s in enumerate(torch.as_tensor(sigma).expand(3))])
    torch.testing.assert_close(x_sigma, by_hand)


def test_sigma_in_double_does_not_widen_the_data():
    x = torch.randn(2, 5)
    assert noise_to(x, x, torch.rand(2, dtype=torch.float64)).dtype == torch.float32


@pytest.mark.parametrize("num_levels", [4, 10, 25])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_dpm2_is_the_multistep_solver_of_diffusers(num_levels, shift):
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True
    )
    scheduler.set_timesteps(num_levels)
    scheduler.sigmas = grid(num_levels, shift).flip(0)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    theirs = x
    for step, t in enumerate(scheduler.timesteps):
        sigma = scheduler.sigmas[step].expand(3)
        theirs = scheduler.step(curved_velocity(theirs, sigma, None), t, theirs).prev_sample
    ours = sample_ode(curved_velocity, x, grid(num_levels, shift), solver="dpm2")
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, sample_ode(curved_velocity, x, grid(num_levels, shift)), atol=1e-3)


def test_euler_steps_by_hand():
    x = torch.randn(2, 3, dtype=torch.float64)
    sigmas = torch.tensor([0, 0.3, 0.6, 0.9], dtype=torch.float64)
    by_hand = x
    for k in (3, 2, 1):
        by_hand = by_hand + (sigmas[k - 1] - sigmas[k]) * curved_velocity(by_hand, sigmas[k].expand(2), None)
    torch.testing.assert_close(sample_ode(curved_velocity, x, sigmas), by_hand)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm2", 2)])
def test_ode_solvers_converge_at_their_order(solver, order):
    """The flow of N(0, 1) maps x at sigma to x / sqrt(alpha^2 + sigma^2)."""
    x = torch.ones(1, 1, dtype=torch.float64)
    exact = 1 / math.sqrt(0.2**2 + 0.8**2)
    coarse, fine = (
        abs(float(sample_ode(gaussian_velocity, x, 0.8 * grid(n), solver=solver)) - exact) for n in (40, 80)
    )
    assert coarse / fine == pytest.approx(2**order, rel=0.15)


@pytest.mark.parametrize("method", ["euler", "dpm2", "sde2", "sde1", "ode"])
def test_one_call_a_step_and_a_point_mass_is_found_exactly(method):
    target = torch.randn(3, 2, 2)
    calls = []

    def velocity(x, sigma, index):
        calls.append((sigma.clone(), index.clone()))
        return (x - target[index]) / sigma.view(-1, 1, 1)

    sigmas, index, x = grid(6, 3.0), torch.tensor([2, 0, 1, 1]), torch.randn(4, 2, 2)
    if method in ("euler", "dpm2"):
        x0 = sample_ode(velocity, x, sigmas, solver=method, index=index)
    else:
        x0 = sample_posterior(velocity, x, sigmas, 6, method=method, index=index)
    torch.testing.assert_close(x0, target[index], rtol=1e-5, atol=1e-5)
    assert [float(sigma[0]) for sigma, _ in calls] == pytest.approx(sigmas[1:].flip(0).tolist())
    assert all(sigma.shape == (4,) and index.equal(seen) for sigma, seen in calls)


REWARDS = [{"center": 2.0, "width": 1.0}, {"center": 1.5, "width": 0.5}]


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("num_levels", [10, 25])
def test_second_order_sde_samples_the_posterior(num_levels, reward):
    assert worst_divergence_error("sde2", grid(num_levels), **reward) < (0.022 if num_levels == 10 else 0.004)


def test_why_the_posterior_needs_a_second_order_sde():
    assert worst_divergence_error("sde2", grid(10), **REWARDS[0]) < 0.005
    assert worst_divergence_error("sde1", grid(10), **REWARDS[0]) > 0.1
    assert worst_divergence_error("ode", grid(10), **REWARDS[0]) > 0.14


def test_sde_converges_to_the_posterior():
    errors = [worst_divergence_error("sde2", grid(n), **REWARDS[1]) for n in (10, 20, 40)]
    assert errors[0] > 3 * errors[1] > 3**2 * errors[2]


def test_sde1_is_the_ancestral_step():
    """One step from s to t draws from the exact q(x_t | x_s, x0 = x0_hat); checked on its two moments."""
    s, t = 0.7, 0.4
    sigmas = torch.tensor([0, t, s], dtype=torch.float64)
    a, b = posterior_moments("sde1", sigmas, 2)
    x0_hat = (1 - s) / ((1 - s) ** 2 + s**2)
    rest = s**2 - ((1 - s) / (1 - t)) ** 2 * t**2  # Var(x_s | x_t)
    gain = (1 - s) / (1 - t) * t**2 / s**2
    variance = t**2 * rest / s**2
    last = (1 - t) / ((1 - t) ** 2 + t**2)
    assert a == pytest.approx(last * ((1 - t) * x0_hat + gain * (1 - (1 - s) * x0_hat)))
    assert b == pytest.approx(last**2 * variance)


def test_default_noise_is_random_and_seeded():
    x = torch.zeros(64, 1)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(sample_posterior(gaussian_velocity, x, grid(5), 5))
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    assert draws[0].std() > 0.3


def test_half_precision_states_are_kept_in_float32():
    assert sample_ode(gaussian_velocity, torch.randn(2, 3).bfloat16(), grid(4)).dtype == torch.float32


@pytest.mark.parametrize("sigmas", [[1.0, 0.5, 0.0], [0.1, 0.5, 1.0], [0.0, 0.5, 0.5], [0.0, 0.5, 1.1], [0.0]])
def test_grids_that_do_not_ascend_from_zero_are_refused(sigmas):
    with pytest.raises(ValueError, match="sigmas must ascend strictly from 0 to at most 1"):
        sample_ode(gaussian_velocity, torch.randn(1, 1), torch.tensor(sigmas))


def test_wrong_names_and_levels_are_refused():
    x = torch.randn(1, 1)
    with pytest.raises(ValueError, match="solver must be 'euler' or 'dpm2', got 'heun'"):
        sample_ode(gaussian_velocity, x, grid(4), solver="heun")
    with pytest.raises(ValueError, match="method must be 'sde2', 'sde1' or 'ode', got 'sde3'"):
        sample_posterior(gaussian_velocity, x, grid(4), 2, method="sde3")
    for level in (0, 5):
        with pytest.raises(ValueError, match=r"level must be in 1 \.\.\. 4"):
            sample_posterior(gaussian_velocity, x, grid(4), level)
