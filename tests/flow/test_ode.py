import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from recast_lightning.flow.ode import sample_ode


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


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_one_call_a_step_and_a_point_mass_is_found_exactly(solver):
    target = torch.randn(3, 2, 2)
    calls = []

    def velocity(x, sigma, index):
        calls.append((sigma.clone(), index.clone()))
        return (x - target[index]) / sigma.view(-1, 1, 1)

    sigmas, index, x = grid(6, 3.0), torch.tensor([2, 0, 1, 1]), torch.randn(4, 2, 2)
    x0 = sample_ode(velocity, x, sigmas, solver=solver, index=index)
    torch.testing.assert_close(x0, target[index], rtol=1e-5, atol=1e-5)
    assert [float(sigma[0]) for sigma, _ in calls] == pytest.approx(sigmas[1:].flip(0).tolist())
    assert all(sigma.shape == (4,) and index.equal(seen) for sigma, seen in calls)


def test_half_precision_states_are_kept_in_float32():
    assert sample_ode(gaussian_velocity, torch.randn(2, 3).bfloat16(), grid(4)).dtype == torch.float32


@pytest.mark.parametrize("sigmas", [[1.0, 0.5, 0.0], [0.1, 0.5, 1.0], [0.0, 0.5, 0.5], [0.0, 0.5, 1.1], [0.0]])
def test_grids_that_do_not_ascend_from_zero_are_refused(sigmas):
    with pytest.raises(ValueError, match="sigmas must ascend strictly from 0 to at most 1"):
        sample_ode(gaussian_velocity, torch.randn(1, 1), torch.tensor(sigmas))


def test_an_unknown_solver_is_refused():
    with pytest.raises(ValueError, match="solver must be 'euler' or 'dpm2', got 'heun'"):
        sample_ode(gaussian_velocity, torch.randn(1, 1), grid(4), solver="heun")
