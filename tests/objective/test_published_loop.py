"""Parity with DiffusionNFT's published loop: numbers that its own code gave (NVlabs/DiffusionNFT at 24af555), float32."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from recast_lightning.flow import noise_to, sample_ode
from recast_lightning.objective import (
    NFTLoss,
    OldPolicySchedule,
    ema_decay,
    group_advantages,
    optimality_probability,
)


def test_loss_and_gradient():
    n = torch.arange(24.0).view(2, 1, 3, 4)
    x0, noise, velocity = torch.sin(n), torch.cos(2 * n), torch.sin(3 * n + 1)
    old, reference = velocity + 0.3 * torch.cos(n), velocity + 0.5 * torch.sin(n * n)
    sigma, r = torch.tensor([0.25, 0.9]), optimality_probability(torch.tensor([1.5, -7.0]), 5.0)
    velocity.requires_grad_()
    terms = NFTLoss(beta=0.1, kl_weight=1e-4)(velocity, old, noise_to(x0, noise, sigma), x0, sigma, r, reference)
    terms.loss.mean().backward()
    close = {"rtol": 2e-6, "atol": 1e-7}
    torch.testing.assert_close(terms.loss.mean(), torch.tensor(43.90412401819512), **close)
    torch.testing.assert_close(terms.positive, torch.tensor([0.34428601047, 1.40386709369]), **close)
    torch.testing.assert_close(terms.negative, torch.tensor([0.34422170942, 1.41190095460]), **close)
    torch.testing.assert_close(terms.kl, torch.tensor([0.12378301471, 0.12672977149]), **close)
    gradient = torch.tensor([0.00159717863, -0.01253307518, 0.01896651834, 0.40714946389, -0.05651285499])
    torch.testing.assert_close(velocity.grad.flatten()[[0, 5, 11, 12, 23]], gradient, rtol=2e-6, atol=2e-7)
    assert velocity.grad.norm().item() == pytest.approx(1.4786748886, rel=1e-6)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("level", [-0.80300898673, 1.26187126486, -0.45886227813, 1.26187126486, -0.45886227813, -0.80300898673, 0, 0]),
        ("group", [-0.88866230832, 1.39646934165, -0.50780703333, 1.39646934165, -0.50780703333, -0.88866230832, 0, 0]),
    ],
)
def test_advantages(std, expected):
    rewards = torch.tensor([0.1, 0.7, 0.4, 0.9, 0.2, 0.3, 0.8, 0.8], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([0, 0, 1, 1, 0, 1, 2, 2]), std=std)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


def test_the_evaluated_average():
    average, found = 0.0, {}
    for step in range(1, 101):
        average += (1 - ema_decay(step, 0.9)) * (torch.sin(torch.tensor(float(step))).item() - average)
        found[step] = average
    expected = {1: 0.68847620, 2: 0.85409212, 10: 0.02398223, 79: 0.05516109, 80: -0.04974388, 100: -0.10889216}
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-6)
    assert [round(ema_decay(step, 0.9), 2) for step in (1, 10, 79, 80, 1000)] == [0.18, 0.55, 0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        # what the published OCR run has at its rollouts 40, 75, 104, 149, of two steps each
        (OldPolicySchedule(0.0075, 75, 0.999), [74, 80, 150, 208, 298], [0, 0.0375, 0.5625, 0.9975, 0.999]),
        (OldPolicySchedule(), [0, 1, 250, 500, 501], [0, 0.001, 0.25, 0.5, 0.5]),
    ],
)
def test_the_old_policy_counts_optimizer_steps(schedule, steps, expected):
    assert [schedule.decay(steps=step, rollouts=step // 2) for step in steps] == pytest.approx(expected)


# DPM-Solver++ 2M and Euler from x = (0.3, -1.2, 0.9) along v = sin 2x + (1 - sigma) x / 2 - sigma
SAMPLED = {
    ("dpm2", 10): [0.07868610322, -0.40592092276, 0.20940077305],
    ("dpm2", 25): [0.15420182049, -0.11887897551, 0.32561135292],
    ("euler", 10): [0.18859899044, 0.04620157555, 0.36002656817],
    ("euler", 25): [0.17389556766, -0.01874881238, 0.33948436379],
}


@pytest.mark.parametrize(("solver", "steps"), SAMPLED)
def test_the_sampler_on_the_grid_of_sd35(solver, steps):
    def velocity(x, sigma, index):
        s = sigma[:, None]
        return torch.sin(2 * x) + (1 - s) * 0.5 * x - s

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    start = torch.tensor([[0.3, -1.2, 0.9]])
    sampled = sample_ode(velocity, start, scheduler.sigmas.flip(0).double(), solver=solver)
    torch.testing.assert_close(sampled, torch.tensor([SAMPLED[solver, steps]]), rtol=0, atol=2e-6)
