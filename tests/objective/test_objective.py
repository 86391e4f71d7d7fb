import pytest
import torch

from recast_lightning.objective import Advantages, NFTLoss, OldPolicySchedule, nft_loss
from recast_lightning.objective.advantages import group_advantages, level_advantages, optimality_probability

NAMES = ("velocity", "velocity_old", "x_sigma", "x0", "sigma", "r")


def batch(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(4, 2, 3, 3, dtype=torch.float64, generator=generator) for _ in range(4)]
    vectors = [torch.rand(4, dtype=torch.float64, generator=generator) for _ in range(2)]
    return dict(zip(NAMES, [t.to(dtype) for t in tensors + vectors], strict=True))


def slow_terms(velocity, velocity_old, x_sigma, x0, sigma, r, beta, clip):
    """The formula, number by number."""
    terms = []
    for b in range(len(x0)):
        errors = []
        for sign in (1, -1):
            squares, absolutes = [], []
            for v, v_old, x, y in zip(
                *(z[b].flatten().tolist() for z in (velocity, velocity_old, x_sigma, x0)), strict=True
            ):
                implicit = (1 - sign * beta) * v_old + sign * beta * v
                difference = x - float(sigma[b]) * implicit - y
                squares.append(difference**2)
                absolutes.append(abs(difference))
            mean = sum(absolutes) / len(absolutes)
            errors.append(sum(squares) / len(squares) / max(mean, 1e-5))
        loss = clip * (float(r[b]) * errors[0] + (1 - float(r[b])) * errors[1]) / beta
        terms.append((*errors, loss))
    return torch.tensor(terms, dtype=torch.float64).T


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_terms_match_the_formula_number_by_number(beta):
    data = batch()
    terms = NFTLoss(beta)(**data)
    positive, negative, loss = slow_terms(**data, beta=beta, clip=5.0)
    for got, expected in ((terms.positive, positive), (terms.negative, negative), (terms.loss, loss)):
        torch.testing.assert_close(got, expected)
    assert terms.kl.eq(0).all()
    assert nft_loss(**data, beta=beta, advantage_clip=5.0).equal(terms.loss)
    assert terms.loss.shape == (4,)


def test_leaving_the_reference_costs_its_weight():
    data, reference = batch(), torch.randn_like(batch()["velocity"])
    terms = NFTLoss(kl_weight=0.5)(**data, velocity_reference=reference)
    torch.testing.assert_close(terms.kl, (data["velocity"] - reference).square().flatten(1).mean(1))
    torch.testing.assert_close(terms.loss, NFTLoss()(**data).loss + 0.5 * terms.kl)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NFTLoss(beta=0.0), "objective.beta must be above 0, got 0"),
        (lambda: NFTLoss(kl_weight=-1.0), "objective.kl_weight must be at least 0, got -1"),
        (lambda: NFTLoss(advantage_clip=float("nan")), "objective.advantage_clip must be above 0, got nan"),
        (lambda: OldPolicySchedule(count="epochs"), "old_policy.count must be 'steps' or 'rollouts', got 'epochs'"),
        (lambda: OldPolicySchedule(maximum=1.0), r"old_policy.maximum must be in \[0, 1\), got 1"),
        (lambda: Advantages(aggregation="mean"), "aggregation must be 'sum' or 'per_reward', got 'mean'"),
        (lambda: Advantages(std="all"), "advantages.std must be 'level' or 'group', got 'all'"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradient_flows_through_the_new_velocity_only_and_not_through_the_scale():
    data = {name: tensor.requires_grad_(name in ("velocity", "velocity_old")) for name, tensor in batch().items()}
    beta, clip = 0.3, 5.0
    nft_loss(**data, beta=beta, advantage_clip=clip).sum().backward()
    assert data["velocity_old"].grad is None
    sigma, r = (data[name].view(-1, 1, 1, 1) for name in ("sigma", "r"))
    expected = 0
    for sign, share in ((1, r), (-1, 1 - r)):
        v = (1 - sign * beta) * data["velocity_old"] + sign * beta * data["velocity"]
        difference = data["x_sigma"] - sigma * v - data["x0"]
        scale = difference.abs().mean((1, 2, 3), keepdim=True)
        expected = expected - clip * share / beta * 2 * difference * sigma * sign * beta / scale / difference[0].numel()
    torch.testing.assert_close(data["velocity"].grad, expected.detach())


def test_at_the_old_policy_good_samples_attract_bad_ones_repel_and_average_ones_do_nothing():
    data = batch()
    data["velocity"] = data["velocity_old"].clone().requires_grad_()
    data["r"] = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    nft_loss(**data, beta=0.1, advantage_clip=5.0).sum().backward()
    sigma = data["sigma"].view(-1, 1, 1, 1)
    towards = (data["x_sigma"] - data["x0"]) / sigma - data["velocity_old"]  # to the velocity that points to x0
    alignment = -(data["velocity"].grad * towards).flatten(1).sum(1)
    assert alignment[0] > 0
    assert alignment[1] < 0
    torch.testing.assert_close(data["velocity"].grad[2:], torch.zeros_like(data["x0"][2:]), atol=1e-12, rtol=0)


def test_half_precision_inputs_are_computed_in_float32():
    data = batch(torch.bfloat16)
    loss = nft_loss(**data, beta=0.1, advantage_clip=5.0)
    assert loss.dtype == torch.float32
    assert loss.equal(nft_loss(**{k: v.float() for k, v in data.items()}, beta=0.1, advantage_clip=5.0))


def test_a_perfect_prediction_costs_nothing():
    data = batch()
    data["velocity"] = data["velocity_old"] = (data["x_sigma"] - data["x0"]) / data["sigma"].view(-1, 1, 1, 1)
    assert nft_loss(**data, beta=0.1, advantage_clip=5.0).abs().max() < 1e-9


def test_an_exact_prediction_costs_exactly_nothing():
    """The error is divided by its own size, which must not make 0 / 0."""
    data = batch()
    data["velocity"] = data["velocity_old"] = torch.zeros_like(data["x0"])
    data["x_sigma"] = data["x0"].clone()
    assert (nft_loss(**data, beta=0.1, advantage_clip=5.0) == 0).all()


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 3.0, 10.0, 20.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, -2, -2])
    centred = torch.tensor([-1.0, 1.0, -5.0, 5.0], dtype=torch.float64)
    by_level = centred / rewards.std(correction=0)
    by_group = centred / torch.tensor([1.0, 1.0, 5.0, 5.0])
    torch.testing.assert_close(group_advantages(rewards, groups, eps=0.0), by_level)
    torch.testing.assert_close(group_advantages(rewards, groups, std="group", eps=0.0), by_group)
    torch.testing.assert_close(group_advantages(rewards, groups, std="group", eps=1.0)[:2], centred[:2] / 2)


def test_levels_do_not_see_each_other_and_order_of_samples_does_not_matter():
    rewards = torch.rand(12, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1])
    groups = torch.randint(0, 3, (12,))
    together = group_advantages(rewards, groups)
    for t in range(3):
        torch.testing.assert_close(together[:, t], group_advantages(rewards[:, t], groups))
    order = torch.randperm(12)
    torch.testing.assert_close(group_advantages(rewards[order], groups[order]), together[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("std", ["level", "group"])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_equal_rewards_have_exactly_no_advantage(dtype, std, eps):
    """The mean of n equal floats is often not that float: any constant, any size."""
    for size in (1, 3, 7, 24):
        for constant in (0.0, 0.1, 1 / 3, 0.7, 123.456, 1e4 / 3, -0.9):
            rewards = torch.full((size + 2,), constant, dtype=dtype)
            rewards[size:] = torch.tensor([0.5, 0.75])
            groups = torch.tensor([0] * size + [1, 1])
            advantages = group_advantages(rewards, groups, std=std, eps=eps)
            assert (advantages[:size] == 0).all()
            assert (advantages[size:] != 0).all()


def test_a_level_without_spread_gives_zeros():
    rewards = torch.stack([torch.full((6,), 0.1), torch.arange(6.0)], dim=1)
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), eps=0.0)
    assert (advantages[:, 0] == 0).all()
    assert (advantages[:, 1] != 0).sum() == 4
    assert advantages.isfinite().all()


@pytest.mark.parametrize("std", ["level", "group"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_failed_rewards_are_left_out(std, bad):
    rewards = torch.tensor([1.0, bad, 3.0, 4.0, 8.0, bad])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    keep = rewards.isfinite()
    advantages = group_advantages(rewards, groups, std=std)
    assert advantages[~keep].isnan().all()
    torch.testing.assert_close(advantages[keep], group_advantages(rewards[keep], groups[keep], std=std))


def rollout_of(groups=4, size=5, rewards=3, levels=2):
    """Scores of very different ranges, [N, R], weights [R, T] that sum to 1 at each level, groups [N]."""
    scale = torch.tensor([0.03, 1.0, 10.0], dtype=torch.float64)[:rewards]
    scores = torch.rand(groups * size, rewards, dtype=torch.float64) * scale
    weights = torch.rand(rewards, levels, dtype=torch.float64)
    member = torch.arange(groups).repeat_interleave(size)
    return scores, weights / weights.sum(0), member[torch.randperm(len(member))]


def slow_advantages(scores, weights, groups, aggregation, std, eps=1e-4):
    """The definition, number by number; scores without failures."""

    def mean(values):
        return sum(values) / len(values)

    def spread(values):
        return mean([(v - mean(values)) ** 2 for v in values]) ** 0.5

    def normalised(values):
        rows = []
        for value, group in zip(values, groups.tolist(), strict=True):
            own = [v for v, g in zip(values, groups.tolist(), strict=True) if g == group]
            rows.append((value - mean(own)) / (spread(own if std == "group" else values) + eps))
        return rows

    columns = []
    for w in weights.T.tolist():
        if aggregation == "sum":
            columns.append(normalised([sum(a * b for a, b in zip(row, w, strict=True)) for row in scores.tolist()]))
            continue
        each = [normalised(column) for column in scores.T.tolist()]
        total = [sum(a * b for a, b in zip(row, w, strict=True)) for row in zip(*each, strict=True)]
        columns.append([(v - mean(total)) / (spread(total) + eps) for v in total])
    return torch.tensor(columns, dtype=torch.float64).T


@pytest.mark.parametrize("aggregation", ["sum", "per_reward"])
@pytest.mark.parametrize("std", ["level", "group"])
def test_level_advantages_match_the_definition_number_by_number(aggregation, std):
    scores, weights, groups = rollout_of()
    got = level_advantages(scores, weights, groups, aggregation=aggregation, std=std)
    expected = slow_advantages(scores, weights, groups, aggregation, std)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_per_reward_hears_a_reward_of_small_range_as_its_weight_says():
    scores, _, groups = rollout_of()
    even = torch.full((3, 1), 1 / 3, dtype=torch.float64)
    louder = scores * torch.tensor([1000.0, 1.0, 1.0])
    sums, each = ([level_advantages(x, even, groups, aggregation=a, eps=0.0) for x in (scores, louder)]
                  for a in ("sum", "per_reward"))  # fmt: skip
    assert (sums[0] - sums[1]).abs().max() > 0.5
    torch.testing.assert_close(each[0], each[1])


@pytest.mark.parametrize("aggregation", ["sum", "per_reward"])
def test_a_group_without_differences_has_exactly_no_advantage_even_beside_failures(aggregation):
    scores, weights, groups = rollout_of()
    scores[groups == 2] = torch.tensor([0.1, 1 / 3, 0.7], dtype=torch.float64)
    scores[(groups == 0).nonzero()[0], 1] = torch.nan
    advantages = level_advantages(scores, weights, groups, aggregation=aggregation)
    assert (advantages[groups == 2] == 0).all()
    assert (advantages[(groups != 2) & ~advantages[:, 0].isnan()] != 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_failed_score_touches_its_own_group_alone_bitwise(bad):
    """`sum`: the sample leaves its group. `per_reward`: it leaves the statistics of the reward that failed."""
    scores, weights, groups = rollout_of()
    lost, own = 7, groups == groups[7]
    siblings = own.clone()
    siblings[lost] = False
    failed = scores.clone()
    failed[lost, 1] = bad

    before, after = (level_advantages(x, weights, groups, std="group") for x in (scores, failed))
    assert after[~own].equal(before[~own])
    assert after[lost].isnan().all()
    alone = level_advantages(scores[siblings], weights, groups[siblings], std="group")
    torch.testing.assert_close(after[siblings], alone)
    assert not torch.allclose(after[siblings], before[siblings])

    before, after = (group_advantages(x, groups, std="group") for x in (scores, failed))
    assert after[~own].equal(before[~own])
    assert after[:, [0, 2]].equal(before[:, [0, 2]])  # the other rewards keep the sample
    torch.testing.assert_close(after[siblings, 1], group_advantages(scores[siblings, 1], groups[siblings], std="group"))
    before, total = (
        level_advantages(x, weights, groups, aggregation="per_reward", std="group") for x in (scores, failed)
    )
    assert total[lost].isnan().all()
    ratio = total[~own] / before[~own]  # the last step rescales all samples alike, and does nothing else
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    expected = after[siblings] @ weights
    torch.testing.assert_close(total[siblings] / total[siblings][:1], expected / expected[:1])


@pytest.mark.parametrize("aggregation", ["sum", "per_reward"])
def test_a_reward_without_weight_may_fail_without_harm(aggregation):
    scores, weights, groups = rollout_of()
    weights[1] = 0
    failed = scores.clone()
    failed[:, 1] = torch.nan
    before, after = (level_advantages(x, weights, groups, aggregation=aggregation) for x in (scores, failed))
    assert after.isfinite().all()
    assert after.equal(before)


@pytest.mark.parametrize("aggregation", ["sum", "per_reward"])
def test_scores_that_all_failed_or_never_differ_give_no_gradient(aggregation):
    weights, groups = torch.tensor([[1.0, 0.5], [0.0, 0.5]]), torch.tensor([0, 0, 1, 1])
    flat = torch.full((4, 2), 0.1)
    assert (level_advantages(flat, weights, groups, aggregation=aggregation) == 0).all()
    flat[:, 1] = torch.nan
    assert level_advantages(flat, weights, groups, aggregation=aggregation).isnan().all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="aggregation must be 'sum' or 'per_reward', got 'mean'"):
        level_advantages(torch.rand(3, 1), torch.ones(1, 1), torch.zeros(3, dtype=torch.long), aggregation="mean")
    with pytest.raises(ValueError, match="std must be 'level' or 'group', got 'batch'"):
        group_advantages(torch.rand(3), torch.zeros(3, dtype=torch.long), std="batch")
    with pytest.raises(ValueError, match=r"groups must be \[3\]"):
        group_advantages(torch.rand(3), torch.zeros(2, dtype=torch.long))


def test_optimality_probability_clips_and_centres():
    advantages = torch.tensor([-100.0, -5.0, -2.5, 0.0, 2.5, 5.0, 100.0])
    expected = torch.tensor([0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
    assert optimality_probability(advantages, 5.0).equal(expected)
    assert optimality_probability(torch.tensor(torch.nan), 5.0).isnan()


@pytest.mark.parametrize(("rollouts", "decay"), [(0, 0.0), (75, 0.0), (76, 0.01), (85, 0.1), (1000, 0.5)])
def test_the_old_policy_may_count_rollouts(rollouts, decay):
    schedule = OldPolicySchedule(rate=0.01, flat=75, maximum=0.5, count="rollouts")
    assert schedule.decay(steps=4 * rollouts, rollouts=rollouts) == pytest.approx(decay)
