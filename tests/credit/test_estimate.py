import math

import pytest
import torch

from recast_lightning.credit import estimate_profile, profile_cost
from recast_lightning.seeds import noise as keyed_noise

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
        k = order - 1
        if k == 0:
            curve.append(0.5 * math.log(width / w) - ((mu - center) ** 2 + nu) / (2 * w))
        else:
            tilt = 0.5 * math.log(w / (w + k * nu)) / k
            curve.append(0.5 * math.log(width / w) + tilt - (mu - center) ** 2 / (2 * (w + k * nu)))
    return torch.tensor(curve, dtype=F64)


def test_order_two_matches_the_closed_form():
    proposals = positive_samples(8000, 2.0, 1.0)
    profile = estimate_profile(
        gaussian_velocity, proposals, {"bump": bump(2.0, 1.0)}, grid(10), generator=seeded(), batch_size=8000
    )
    exact = exact_divergence(grid(10), 2, 2.0, 1.0)
    assert (profile.divergence[0] - exact).abs().max() < 0.02
    assert (profile.gains[0] + exact.diff()).abs().max() < 0.012
    assert ((profile.divergence[0] - exact).abs() < 4 * profile.stderr[0] + 0.01).all()
    torch.testing.assert_close(profile.mean_rewards.log(), profile.divergence)
    assert profile.network_calls == profile_cost(8000, grid(10)) <= 8000 * 55
    assert (profile.nested_bias == 0).all()


@pytest.mark.parametrize("order", [1.0, 1.5])
def test_nested_orders_match_the_closed_form_once_the_jackknife_has_been_at_them(order):
    proposals = positive_samples(2000, 1.5, 0.5)
    profile = estimate_profile(
        gaussian_velocity,
        proposals,
        {"bump": bump(1.5, 0.5)},
        grid(10),
        order=order,
        rollouts=12,
        generator=seeded(),
        batch_size=40000,
    )
    exact = exact_divergence(grid(10), order, 1.5, 0.5)
    error, raw = profile.divergence[0] - exact, profile.divergence[0] + profile.nested_bias[0] - exact
    assert error.abs().max() < 0.035
    assert raw.abs().max() > 1.5 * error.abs().max()
    assert (profile.gains[0] + exact.diff()).abs().max() < 0.02
    assert profile.order == order


@pytest.mark.parametrize("posterior", ["sde1", "ode"])
def test_other_posteriors_are_off(posterior):
    profile = estimate_profile(
        gaussian_velocity,
        positive_samples(4000, 2.0, 1.0),
        {"bump": bump(2.0, 1.0)},
        grid(10),
        posterior=posterior,
        steps="grid",
        generator=seeded(),
        batch_size=4000,
    )
    error = profile.divergence[0] - exact_divergence(grid(10), 2, 2.0, 1.0)
    assert (error[7] < -0.05) if posterior == "sde1" else (error[7] > 0.1)
    assert profile.posterior == posterior
    assert profile.network_calls == 4000 * 55


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
        for name in ("divergence", "replicates", "mean_rewards"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), rtol=1e-5, atol=1e-6)
        assert part.network_calls == whole.network_calls == profile_cost(7, grid(4), 3)


def test_the_network_sees_full_batches():
    """Rows of all levels share a batch: those that arrive leave, and the next ones take their place."""
    sizes = []

    def velocity(x, sigma, index):
        sizes.append((len(x), len(sigma.unique())))
        return gaussian_velocity(x, sigma, index)

    profile = small(velocity=velocity, rollouts=3, batch_size=10)
    assert sum(rows for rows, _ in sizes) == profile.network_calls
    assert {rows for rows, _ in sizes[:-6]} == {10}
    assert max(kinds for _, kinds in sizes) > 3


def test_seed_completions_and_proposals_each_give_their_own_noise():
    assert small().divergence.equal(small().divergence)
    assert not small(seed=1).divergence[:, 1:].equal(small().divergence[:, 1:])
    assert not small(rollouts=2).divergence[:, 2:].equal(small().divergence[:, 2:])
    scores = []
    twins = torch.zeros(2, 2, 3)
    small(
        proposals=twins,
        steps=6,
        rewards={"r": lambda x0, index: scores.append(x0[index.argsort()]) or x0.new_ones(len(x0))},
    )
    rows = torch.cat(scores)
    assert len(rows.flatten(1)[:, 0].unique()) == 1 + 2 * 4


def starts_and_ends(order):
    """First states of the completions of one proposal, by level, and where they end."""
    starts, ends = {}, []

    def velocity(x, sigma, index):
        for row, s in zip(x, sigma.tolist(), strict=True):
            if round(4 * s, 6) % 1 == 0:
                starts.setdefault(round(4 * s), []).append(row)
        return gaussian_velocity(x, sigma, index)

    def reward(x0, index):
        ends.append(x0)
        return x0.new_ones(len(x0))

    small(velocity=velocity, proposals=torch.zeros(1, 3), rewards={"r": reward}, rollouts=4, order=order, steps=6)
    return {level: torch.stack(rows) for level, rows in starts.items()}, torch.cat(ends)


def test_nested_completions_of_a_proposal_start_from_one_noisy_state_and_part_on_the_way():
    """m(x_t) = E[r | x_t] of orders other than 2 is a mean at one and the same x_t."""
    starts, ends = starts_and_ends(1.0)
    assert starts.keys() == {1, 2, 3, 4}
    for x_t in starts.values():
        assert x_t.equal(x_t[:1].expand_as(x_t))
    assert len(ends[:, 0].unique()) == 1 + 4 * 4


def test_at_order_two_completions_start_afresh_in_antithetic_pairs():
    starts, _ = starts_and_ends(2.0)
    for x_t in starts.values():
        assert len(x_t[:, 0].unique()) == 4
        torch.testing.assert_close(x_t[0], -x_t[1])  # of a proposal at 0


def test_neighbouring_levels_ride_on_one_brownian_motion():
    """Where the policy knows the proposal, all levels end in it; where it knows nothing, states differ by its pull only."""
    independent, coupled = [], []
    for seed in range(40):
        profile = estimate_profile(
            gaussian_velocity,
            positive_samples(50, 2.0, 1.0),
            {"bump": bump(2.0, 1.0)},
            grid(10),
            generator=seeded(seed),
        )
        coupled.append(profile.gains[0])
        shuffled = torch.stack([
            estimate_profile(gaussian_velocity, positive_samples(50, 2.0, 1.0), {"bump": bump(2.0, 1.0)}, grid(10),
                             levels=[7, 8, 10], generator=seeded(1000 * seed + k)).divergence[0, k] for k in (7, 8)
        ])  # fmt: skip
        independent.append(shuffled[0] - shuffled[1])
    assert torch.stack(coupled)[:, 7].var() < 0.5 * torch.stack(independent).var()


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


@pytest.mark.parametrize(("order", "completions"), [(2.0, 1), (1.0, 4)])
def test_error_bars_are_those_of_repetition(order, completions):
    rewards = {"bump": bump(1.5, 0.8)}
    runs = [
        estimate_profile(
            gaussian_velocity,
            0.7 + 0.6 * torch.randn(60, 1, dtype=F64, generator=seeded(seed)),
            rewards,
            grid(4),
            order=order,
            rollouts=completions,
            generator=seeded(1000 + seed),
            batch_size=2000,
        )
        for seed in range(100)
    ]
    for value, error in (("divergence", "stderr"), ("gains", "gains_stderr")):
        spread = torch.stack([getattr(run, value) for run in runs]).std(0)
        claimed = torch.stack([getattr(run, error) for run in runs]).mean(0)
        assert ((claimed / spread) - 1).abs().max() < 0.3, (value, claimed / spread)
    paired = torch.stack([run.gains_stderr for run in runs]).mean(0)
    unpaired = torch.stack([run.stderr for run in runs]).square().mean(0)
    assert (paired < 0.9 * (unpaired[:, 1:] + unpaired[:, :-1]).sqrt()).all()


def test_error_bars_are_over_prompts_not_over_proposals():
    """Four proposals of each prompt, all alike: as uncertain as one of each."""
    proposals = torch.randn(20, 1, dtype=F64, generator=seeded(3)).repeat_interleave(4, 0)
    numbers = [7 * (i // 4) for i in range(80)]  # any numbers
    rewards = {"r": lambda x0, index: torch.exp(proposals[index, 0])}
    clustered = small(proposals=proposals, rewards=rewards, prompts=numbers)
    alone = small(proposals=proposals[::4], rewards={"r": lambda x0, index: torch.exp(proposals[4 * index, 0])})
    naive = small(proposals=proposals, rewards=rewards)
    assert clustered.num_prompts == 20
    torch.testing.assert_close(clustered.stderr, alone.stderr, rtol=0.02, atol=0)
    assert naive.stderr[0, 0] < 0.6 * clustered.stderr[0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_failed_score_takes_its_proposal_out_of_that_reward_at_all_levels(bad):
    def patchy(x0, index):
        score = REWARDS["bump"](x0[:, 0], index)
        fails = (index == 2) & (torch.tensor(len(calls)) == 0)
        calls.append(index)
        return score.where(~fails, bad)

    calls = []
    proposals = torch.randn(7, 2, 3, generator=seeded(3))
    whole = {"whole": lambda x0, index: REWARDS["bump"](x0[:, 0], index)}
    profile = small(rewards={"patchy": patchy, **whole}, batch_size=1000)
    assert profile.failed == {"patchy": 1, "whole": 0}
    assert profile.divergence.isfinite().all()
    assert (profile.divergence[0] != profile.divergence[1]).all()
    others = small(rewards={"some": lambda x0, index: REWARDS["bump"](x0[:, 0], index).where(index != 2, torch.nan)},
                   proposals=proposals, batch_size=1000)  # fmt: skip
    torch.testing.assert_close(profile.mean_rewards[0], others.mean_rewards[0])


def test_completions_can_differ_by_level():
    profile = small(rollouts=[1, 1, 2, 4])
    assert profile.rollouts == [1, 1, 2, 4]
    assert profile.network_calls == profile_cost(7, grid(4), [1, 1, 2, 4])
    torch.testing.assert_close(profile.divergence[:, :3], small().divergence[:, :3], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(profile.divergence[:, 3:], small().divergence[:, 3:])


def test_unmeasured_levels_are_filled_in_monotonically():
    proposals, rewards = positive_samples(3000, 2.0, 1.0), {"bump": bump(2.0, 1.0)}
    whole, coarse = (
        estimate_profile(
            gaussian_velocity, proposals, rewards, grid(25), levels=levels, steps=6, generator=seeded(), batch_size=3000
        )
        for levels in (None, 8)
    )
    assert coarse.levels == [1, 4, 8, 11, 15, 18, 22, 25]
    assert coarse.network_calls < 0.4 * whole.network_calls
    assert coarse.divergence.shape == whole.divergence.shape
    assert (coarse.divergence - whole.divergence).abs().max() < 0.05
    curves = torch.stack([coarse.gains[0], whole.gains[0]])
    assert torch.corrcoef(curves)[0, 1] > 0.97


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill", [1, 2, 9, 30])
def test_a_killed_profile_goes_on_with_nothing_done_twice_and_the_same_numbers(tmp_path, kill):
    def run(stop_at=None, **options):
        def velocity(x, sigma, index):
            calls.append(len(x))
            if len(calls) == stop_at:
                raise Killed
            return gaussian_velocity(x, sigma, index)

        calls = []
        try:
            return small(
                velocity=velocity, rollouts=4, steps=6, batch_size=8, unfinished=tmp_path / "part", **options
            ), calls
        except Killed:
            return None, calls[:-1]

    straight, all_calls = run()
    assert list(tmp_path.iterdir()) == []  # done: nothing is left over
    nothing, first = run(stop_at=kill)
    assert nothing is None
    with pytest.raises(ValueError, match=r"unfinished profile .* is of another order \(2\.0, now 3\.0\): delete it"):
        run(order=3.0)
    resumed, rest = run()
    assert first + rest == all_calls
    for name in ("divergence", "replicates", "mean_rewards"):
        assert getattr(resumed, name).equal(getattr(straight, name))


@pytest.mark.parametrize("kill", [1, 4])
def test_stopped_while_jobs_enter_the_batch_it_keeps_no_half_made_row(tmp_path, monkeypatch, kill):
    straight, drawn = small(rollouts=4, steps=6, batch_size=8), []

    def noise(shape, keys):
        drawn.append(keys)
        if len(drawn) == kill:
            raise Killed
        return keyed_noise(shape, keys)

    with monkeypatch.context() as patched:
        patched.setattr("recast_lightning.credit.completions.keyed_noise", noise)
        with pytest.raises(Killed):
            small(rollouts=4, steps=6, batch_size=8, unfinished=tmp_path / "part")
    resumed = small(rollouts=4, steps=6, batch_size=8, unfinished=tmp_path / "part")
    assert resumed.divergence.equal(straight.divergence)


def test_processes_share_the_work_and_get_the_same_numbers():
    """Two processes in turn, each handing over what the other one sums in."""
    sums, called = [], [0, 0]

    def shared(rank, partner):
        def velocity(x, sigma, index):
            called[rank] += len(x)
            assert (index % 2 == rank).all()
            return gaussian_velocity(x, sigma, index)

        def total(tensor):
            if tensor.ndim == 0:
                return tensor
            sums.append(tensor)
            return tensor + partner if partner is not None else tensor

        return small(velocity=velocity, rollouts=3, rank=rank, world_size=2, total=total)

    alone = small(rollouts=3)
    with pytest.raises(ValueError, match="is 0 in all completions|failed on every|must be"):
        shared(0, torch.nan)  # the sum is not there: every score is lost
    first = sums[0]
    second = shared(1, first)
    torch.testing.assert_close(second.divergence, alone.divergence, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second.replicates, alone.replicates, rtol=1e-4, atol=1e-5)
    assert second.network_calls == alone.network_calls == sum(called)


def test_a_process_without_work_calls_the_network_along():
    """Sharded models wait for each other in every call."""
    flags, calls = iter([1.0] * 5 + [0.0]), []

    def velocity(x, sigma, index):
        calls.append(len(x))
        assert index.tolist() == [0] * len(x)
        return gaussian_velocity(x, sigma, index)

    with pytest.raises(ValueError, match="failed on every proposal"):
        small(velocity=velocity, proposals=torch.ones(1, 3), rewards={"r": lambda x0, index: x0[:, 0]}, rank=1,
              world_size=2, total=lambda t: torch.tensor(next(flags)) if t.ndim == 0 else t * torch.nan)  # fmt: skip
    assert calls == [1] * 5


def self_proposals(per_prompt=200, prompts=3):
    """The policy's own samples N(0, 1), several a prompt."""
    return torch.randn(per_prompt * prompts, 1, dtype=F64, generator=seeded(4)), [i // per_prompt for i in range(600)]


def test_the_policys_own_images_stand_for_the_positive_policy_by_their_weight():
    own, numbers = self_proposals()
    rewards = {"bump": bump(1.0, 1.0)}
    exact = exact_divergence(grid(10), 2, 1.0, 1.0)
    weighted = estimate_profile(
        gaussian_velocity, own, rewards, grid(10), prompts=numbers, importance=True, generator=seeded(), batch_size=600
    )
    plain = estimate_profile(gaussian_velocity, own, rewards, grid(10), generator=seeded(), batch_size=600)
    assert (weighted.divergence[0] - exact).abs().max() < 0.06
    assert (plain.divergence[0] - exact).abs().max() > 0.15
    assert 0.5 * 200 < weighted.effective_samples["bump"] < 0.9 * 200  # E[r]^2 / E[r^2] is 0.73 here
    assert plain.effective_samples == {}
    with pytest.raises(ValueError, match="'none' is 0 on every image of the policy's own"):
        small(rewards={"none": lambda x0, index: torch.zeros(len(x0))}, importance=True)


def test_rewards_that_cannot_be_measured_are_refused_by_name():
    with pytest.raises(ValueError, match="Reward 'broken' failed on every proposal"):
        small(rewards={"broken": lambda x0, index: torch.full((len(x0),), torch.nan)})
    with pytest.raises(ValueError, match=r"Reward 'signed' gave -0.5, but rewards must be non-negative: .* transform"):
        small(rewards={"signed": lambda x0, index: torch.full((len(x0),), -0.5)})
    with pytest.raises(ValueError, match=r"Reward 'wide' must give one score a sample, \[35\], got \[35, 3\]"):
        small(rewards={"wide": lambda x0, index: x0[:, 0].abs()})
    with pytest.raises(ValueError, match="Reward 'sparse' is 0 in all completions .* which order 1 cannot measure"):
        small(rewards={"sparse": lambda x0, index: (index > 2).float()}, order=1, rollouts=2)
    with pytest.raises(ValueError, match="Order 1 needs at least 2 completions .* Use order 2"):
        small(order=1)


def test_a_dead_reward_is_flat():
    profile = small(rewards={"dead": lambda x0, index: x0.new_zeros(len(x0))})
    assert (profile.gains == 0).all()
    assert (profile.gains_stderr == 0).all()
    assert (profile.mean_rewards == 0).all()


def test_a_level_without_any_success_counts_as_half_of_one():
    def text(x0, index):
        seen.extend((x0[:, 0, 0] - x0[0, 0, 0]).tolist())
        near = (x0[:, 0] - proposals[index, 0]).abs().amax(1) < 1e-6
        return 0.8 * near.float()  # the proposals themselves

    seen, proposals = [], torch.randn(7, 2, 3, generator=seeded(3))
    profile = small(rewards={"text": text}, proposals=proposals, batch_size=1000)
    expected = torch.tensor([math.log(0.8)] + [math.log(0.8 / 14)] * 4, dtype=F64)
    torch.testing.assert_close(profile.divergence[0], expected, rtol=0, atol=1e-6)
    assert profile.mean_rewards[0, 3] == 0


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
    assert seen[-1] == profile.network_calls == profile_cost(7, grid(4))
    assert profile.metadata == {"policy": "signboard"}
    assert profile.divergence.dtype == F64
    assert profile.rewards == ["bump", "other"]


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"rewards": {}}, {"proposals": torch.ones(0, 2)}])
def test_nothing_to_measure_is_refused(options):
    with pytest.raises(ValueError, match="must each be at least one"):
        small(**options)


def test_a_wrong_order_is_refused_before_any_work():
    def never(x, sigma, index):
        raise AssertionError("called")

    with pytest.raises(ValueError, match="order must be positive, got -1"):
        small(velocity=never, order=-1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts": 0}, "completions must be a number of at least 1, or one for each of the 4 levels, got 0"),
        ({"rollouts": [1, 2]}, r"one for each of the 4 levels, got \[1, 2\]"),
        ({"steps": 0}, "steps must be 'auto', 'grid' or at least 1, got 0"),
        ({"levels": 9}, "levels must be 2 to 4, or a list of levels, got 9"),
        ({"levels": [1, 2]}, r"levels must lie in 1 \.\.\. 4 and hold 4, got \[1, 2\]"),
        ({"prompts": [1, 2]}, "prompts must give one number a proposal, 7, got 2"),
        ({"posterior": "sde3"}, "posterior must be 'sde2', 'sde1' or 'ode', got 'sde3'"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
