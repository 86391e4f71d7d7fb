import math

import pytest
import torch

from recast_lightning.credit import estimate_profile, profile_cost

F64 = torch.float64


def grid(num_levels):
    return torch.linspace(0, 1, num_levels + 1, dtype=F64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian_velocity(x, sigma, index):
    """Policy N(0, 1): E[x0 | x_sigma] = alpha x / (alpha^2 + sigma^2)."""
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    return (x - x * (1 - sigma) / ((1 - sigma) ** 2 + sigma**2)) / sigma


def bump(center, width):
    return lambda x0, index: torch.exp(-((x0[:, 0] - center) ** 2) / (2 * width))


def positive_samples(num, center, width):
    """pi+ of `bump` on N(0, 1) is N(center / (1 + width), width / (1 + width)); even quantiles, shuffled."""
    z = torch.distributions.Normal(0.0, 1.0).icdf((torch.randperm(num, generator=seeded(9)).to(F64) + 0.5) / num)
    return (center / (1 + width) + (width / (1 + width)) ** 0.5 * z).unsqueeze(1)


def exact_divergence(sigmas, order, center, width):
    """Closed form of D + log p for pi = N(0, 1) and r = exp(-(x0 - center)^2 / (2 width)), at pi+.

    x0 | x_t ~ N(a x_t, b) with a = alpha / (alpha^2 + sigma^2), b = sigma^2 / (alpha^2 + sigma^2), so that
    m(x_t) = sqrt(width / w) exp(-(a x_t - center)^2 / (2 w)), w = width + b; under pi+, a x_t ~ N(mu, nu).
    """
    curve = []
    for sigma in sigmas.tolist():
        total = (1 - sigma) ** 2 + sigma**2
        a, b = (1 - sigma) / total, sigma**2 / total
        w = width + b
        mu = a * (1 - sigma) * center / (1 + width)
        nu = a**2 * ((1 - sigma) ** 2 * width / (1 + width) + sigma**2)
        if order == 1:
            curve.append(0.5 * math.log(width / w) - ((mu - center) ** 2 + nu) / (2 * w))
        else:
            curve.append(0.5 * math.log(width / (w + nu)) - (mu - center) ** 2 / (2 * (w + nu)))
    return torch.tensor(curve, dtype=F64)


def test_order_two_matches_the_closed_form():
    proposals = positive_samples(8000, 2.0, 1.0)
    profile = estimate_profile(
        gaussian_velocity, proposals, {"bump": bump(2.0, 1.0)}, grid(10), generator=seeded(), batch_size=8000
    )
    exact = exact_divergence(grid(10), 2, 2.0, 1.0)
    assert (profile.divergence[0] - exact).abs().max() < 0.02
    assert (profile.gains[0] + exact.diff()).abs().max() < 0.012
    assert ((profile.divergence[0] - exact).abs() < 4 * profile.stderr[0] + 0.005).all()
    torch.testing.assert_close(profile.mean_rewards.log(), profile.divergence)
    assert profile.network_calls == 8000 * 55 == profile_cost(8000, 10)


def test_order_one_matches_the_closed_form():
    proposals = positive_samples(1000, 1.5, 0.5)
    profile = estimate_profile(
        gaussian_velocity,
        proposals,
        {"bump": bump(1.5, 0.5)},
        grid(10),
        order=1,
        rollouts=40,
        generator=seeded(),
        batch_size=40000,
    )
    exact = exact_divergence(grid(10), 1, 1.5, 0.5)
    assert (profile.divergence[0] - exact).abs().max() < 0.04
    assert (profile.gains[0] + exact.diff()).abs().max() < 0.02
    assert profile.order == 1.0
    assert profile.network_calls == profile_cost(1000, 10, 40)


@pytest.mark.parametrize("posterior", ["sde1", "ode"])
def test_other_posteriors_are_off(posterior):
    profile = estimate_profile(
        gaussian_velocity,
        positive_samples(4000, 2.0, 1.0),
        {"bump": bump(2.0, 1.0)},
        grid(10),
        posterior=posterior,
        generator=seeded(),
        batch_size=4000,
    )
    error = profile.divergence[0] - exact_divergence(grid(10), 2, 2.0, 1.0)
    assert (error[7] < -0.05) if posterior == "sde1" else (error[7] > 0.1)
    assert profile.posterior == posterior


REWARDS = {"bump": bump(2.0, 1.0), "other": bump(-1.0, 0.3)}


def small(**options):
    proposals = torch.randn(7, 2, 3, generator=seeded(3))
    rewards = {name: lambda x0, index, reward=reward: reward(x0[:, 0], index) for name, reward in REWARDS.items()}
    return estimate_profile(
        options.pop("velocity", gaussian_velocity),
        options.pop("proposals", proposals),
        options.pop("rewards", rewards),
        grid(4),
        generator=seeded(options.pop("seed", 0)),
        **options,
    )


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_batch_size_changes_nothing(order):
    whole = small(rollouts=3, order=order, batch_size=1000)
    for batch_size in (1, 4, 7, 20):
        part = small(rollouts=3, order=order, batch_size=batch_size)
        for name in ("divergence", "stderr", "gains_stderr", "mean_rewards"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), rtol=1e-6, atol=1e-7)
        assert part.network_calls == whole.network_calls == 7 * 3 * 10


def test_seed_rollouts_and_proposals_each_give_their_own_noise():
    assert small().divergence.equal(small().divergence)
    assert not small(seed=1).divergence[:, 1:].equal(small().divergence[:, 1:])
    assert not small(rollouts=2).divergence[:, 2:].equal(small().divergence[:, 2:])
    scores = []
    twins = torch.zeros(2, 2, 3)
    small(proposals=twins, rewards={"r": lambda x0, index: scores.append(x0) or x0.new_ones(len(x0))})
    assert all((x0[0] != x0[1]).all() for x0 in scores[1:])


def test_rollouts_of_a_proposal_start_from_one_noisy_state_and_part_on_the_way():
    """m(x_t) = E[r | x_t] of orders other than 2 is a mean at one and the same x_t."""
    starts, ends = [], []

    def velocity(x, sigma, index):
        if len(starts) < 10:
            starts.append(x.clone())
        return gaussian_velocity(x, sigma, index)

    def reward(x0, index):
        ends.append(x0)
        return x0.new_ones(len(x0))

    small(velocity=velocity, proposals=torch.zeros(1, 3), rewards={"r": reward}, rollouts=4)
    first_steps = [starts[0], starts[1], starts[3], starts[6]]  # levels 1, 2, 3, 4 take 1, 2, 3, 4 calls
    for x_t in first_steps:
        assert x_t.equal(x_t[:1].expand_as(x_t))
    assert len(ends[4][:, 0].unique()) == 4


def test_index_is_the_row_of_the_proposal():
    proposals = torch.arange(5.0).unsqueeze(1)
    seen = []

    def point_mass(x, sigma, index):
        return (x - proposals[index]) / sigma.view(-1, 1)

    def reward(x0, index):
        seen.append(index)
        torch.testing.assert_close(x0[:, 0], index.float(), rtol=0, atol=1e-4)
        return index.float()

    profile = small(velocity=point_mass, proposals=proposals, rewards={"row": reward}, rollouts=2, batch_size=3)
    torch.testing.assert_close(profile.mean_rewards[0], torch.full((5,), 2.0, dtype=F64), rtol=0, atol=1e-4)
    assert torch.cat(seen).bincount().tolist() == [1 + 2 * 4] * 5


def test_error_bars_are_those_of_repetition():
    sigmas = grid(4)
    rewards = {"bump": bump(1.5, 0.8)}
    runs = [
        estimate_profile(
            gaussian_velocity,
            0.7 + 0.6 * torch.randn(60, 1, dtype=F64, generator=seeded(seed)),
            rewards,
            sigmas,
            generator=seeded(1000 + seed),
        )
        for seed in range(150)
    ]
    for value, error in (("divergence", "stderr"), ("gains", "gains_stderr")):
        spread = torch.stack([getattr(run, value) for run in runs]).std(0)
        claimed = torch.stack([getattr(run, error) for run in runs]).mean(0)
        assert ((claimed / spread) - 1).abs().max() < 0.3, (value, claimed / spread)
    paired = torch.stack([run.gains_stderr for run in runs]).mean(0)
    unpaired = torch.stack([run.stderr for run in runs]).square().mean(0)
    assert (paired < 0.9 * (unpaired[:, 1:] + unpaired[:, :-1]).sqrt()).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_failed_score_takes_its_proposal_out_of_that_reward_at_all_levels(bad):
    def patchy(x0, index):
        score = REWARDS["bump"](x0[:, 0], index)
        first = not calls
        calls.append(index)
        return score.where(index != 2, bad) if first else score

    calls = []
    proposals = torch.randn(7, 2, 3, generator=seeded(3))
    profile = small(rewards={"patchy": patchy, "whole": lambda x0, index: REWARDS["bump"](x0[:, 0], index)})
    assert profile.failed == {"patchy": 1, "whole": 0}
    assert profile.divergence.isfinite().all()
    assert (profile.divergence[0] != profile.divergence[1]).all()

    keep = torch.tensor([0, 1, 3, 4, 5, 6])
    scores = {}

    def spy(x0, index):
        score = REWARDS["bump"](x0[:, 0], index)
        scores.setdefault("all", []).append(score[keep].double().mean())
        return score

    small(rewards={"spy": spy}, proposals=proposals)
    torch.testing.assert_close(profile.mean_rewards[0], torch.stack(scores["all"]))


def test_rewards_that_cannot_be_measured_are_refused_by_name():
    with pytest.raises(ValueError, match="Reward 'broken' failed on every proposal"):
        small(rewards={"broken": lambda x0, index: torch.full((len(x0),), torch.nan)})
    with pytest.raises(ValueError, match=r"Reward 'signed' gave -0.5, but rewards must be non-negative: .* transform"):
        small(rewards={"signed": lambda x0, index: torch.full((len(x0),), -0.5)})
    with pytest.raises(ValueError, match=r"Reward 'wide' must give one score a sample, \[7\], got \[7, 3\]"):
        small(rewards={"wide": lambda x0, index: x0[:, 0].abs()})
    with pytest.raises(ValueError, match="Reward 'sparse' is 0 on some proposals, which order 1 cannot measure"):
        small(rewards={"sparse": lambda x0, index: (index > 2).float()}, order=1)


def test_a_dead_reward_is_flat():
    profile = small(rewards={"dead": lambda x0, index: x0.new_zeros(len(x0))})
    assert (profile.gains == 0).all()
    assert (profile.gains_stderr == 0).all()
    assert (profile.mean_rewards == 0).all()


def test_a_level_without_any_success_counts_as_half_of_one():
    calls = []

    def text(x0, index):
        calls.append(index)
        return x0.new_zeros(len(x0)) if len(calls) > 3 else x0.new_full((len(x0),), 0.8)

    profile = small(rewards={"text": text})
    half = math.log(0.8 / 14)
    expected = torch.tensor([math.log(0.8)] * 3 + [half] * 2, dtype=F64)
    torch.testing.assert_close(profile.divergence[0], expected, rtol=0, atol=1e-6)
    assert profile.mean_rewards[0, 3] == 0
    assert profile.stderr[0, 3] == pytest.approx(1.0)


def test_one_proposal_has_no_error_bars():
    profile = small(proposals=torch.ones(1, 2, 3))
    assert profile.divergence.isfinite().all()
    assert (profile.stderr == torch.inf).all()
    assert profile.gains_stderr.shape == (2, 4)
    assert (profile.gains_stderr == torch.inf).all()


def test_progress_metadata_and_half_precision():
    seen = []
    profile = small(
        proposals=torch.randn(7, 2, 3, generator=seeded(3)).bfloat16(),
        progress=seen.append,
        batch_size=4,
        metadata={"policy": "signboard"},
    )
    assert seen == sorted(seen)
    assert seen[-1] == profile.network_calls == profile_cost(7, 4)
    assert len(seen) == 8
    assert profile.metadata == {"policy": "signboard"}
    assert profile.divergence.dtype == F64
    assert profile.rewards == ["bump", "other"]


@pytest.mark.parametrize(
    "options", [{"rollouts": 0}, {"batch_size": 0}, {"rewards": {}}, {"proposals": torch.ones(0, 2)}]
)
def test_nothing_to_measure_is_refused(options):
    with pytest.raises(ValueError, match="must each be at least one"):
        small(**options)


def test_a_wrong_order_is_refused_before_any_work():
    def never(x, sigma, index):
        raise AssertionError("called")

    with pytest.raises(ValueError, match="order must be positive, got -1"):
        small(velocity=never, order=-1.0)
