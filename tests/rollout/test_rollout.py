import re
from pathlib import Path

import pytest
import torch

from recast_lightning.credit import CreditMatrix
from recast_lightning.errors import UserError
from recast_lightning.evaluation import EvaluationBatches
from recast_lightning.objective.advantages import group_advantages, level_advantages, optimality_probability
from recast_lightning.prompts import Prompt
from recast_lightning.rollout.metrics import check_failures, constant_rewards, rollout_metrics
from recast_lightning.rollout.samples import check_sizes, plan_samples
from recast_lightning.training.data import PromptDataModule, load_prompts

NAN = float("nan")
PAGE = Path(__file__).parents[2] / "docs/from-score-to-r.md"


def test_groups_stay_whole_and_every_world_size_trains_on_the_same_images_in_each_part():
    prompts, size = [7, 3, 9, 3], 6
    single = plan_samples(prompts, size, 0, 1, seed=0, rollout=2)
    ranks = [plan_samples(prompts, size, rank, 2, seed=0, rollout=2) for rank in range(2)]
    assert {(s.group, s.image) for s in single} == {(g, i) for g in range(4) for i in range(6)}
    assert {s.group for s in ranks[0]}.isdisjoint({s.group for s in ranks[1]})
    for part in range(3):  # thirds of an epoch
        whole = set(single[part * 8 : (part + 1) * 8])
        assert whole == {s for rank in ranks for s in rank[part * 4 : (part + 1) * 4]}


def test_order_changes_from_rollout_to_rollout():
    assert plan_samples([0], 12, 0, 1, 0, 0) != plan_samples([0], 12, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((7, 4, 4, 2), "prompts_per_rollout 7 .* take 6 or 8"),
        ((12, 12, 50, 1), "micro_batch_size 50 does not divide the 144 .* take 48 or 72"),
        ((1, 4, 4, 2), "processes: take 2\\."),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_legal_ones(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_sizes(*sizes)


def test_sizes_that_divide_pass():
    check_sizes(12, 12, 48, 1)
    check_sizes(12, 12, 24, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_seven_evaluation_prompts_count_as_seven_on_any_world_size(world_size):
    prompts = [Prompt(f"sign {i}") for i in range(7)]
    shards = [EvaluationBatches(prompts, 2, rank, world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    items = [item for shard in shards for batch in shard for item in zip(batch.index, batch.real, strict=True)]
    assert sorted(i for i, real in items if real) == list(range(7))


def test_prompts_of_a_rollout_are_the_next_of_a_shuffled_pass():
    data = PromptDataModule(train="signboard:train:10", validation="signboard:validation:2", prompts_per_rollout=4)
    data.load(ocr=True)
    drawn = [i for rollout in range(5) for i in data.rollout_prompts(rollout, seed=0)]
    assert sorted(drawn[:10]) == list(range(10))
    assert sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert data.rollout_prompts(3, seed=0) == drawn[12:16]
    assert data.rollout_prompts(3, seed=1) != drawn[12:16]


def test_more_prompts_a_rollout_than_there_are_is_refused():
    data = PromptDataModule(train="signboard:train:3", validation="signboard:validation:2", prompts_per_rollout=4)
    with pytest.raises(ValueError, match="prompts_per_rollout is 4, but .* has only 3"):
        data.load(ocr=True)


@pytest.mark.parametrize("source", ["signboard:train", "signboard:train:0", "signboard:train:x"])
def test_malformed_signboard_sources_are_refused(source):
    with pytest.raises(ValueError, match="SPLIT:COUNT"):
        load_prompts(source, ocr=False)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="train, validation"):
        load_prompts("signboard:dev:3", ocr=False)


def test_files_are_read_with_their_targets(tmp_path):
    (tmp_path / "p.txt").write_text('a shop called "OPEN"\n')
    assert load_prompts(str(tmp_path / "p.txt"), ocr=True)[0].ocr_target == "OPEN"


def test_keyed_noise_does_not_depend_on_the_batch():
    from recast_lightning.seeds import noise

    keys = [("a", i) for i in range(4)]
    assert torch.equal(noise((2, 3), keys)[2:], noise((2, 3), keys[2:]))
    assert not torch.equal(*noise((2, 3), [("a", 1), ("b", 1)]))


def metrics_of(*columns):
    rewards = torch.tensor(columns).T
    names = [chr(ord("a") + i) for i in range(len(columns))]
    r = torch.rand(len(rewards), 2)
    return {"rollout": 3.0} | rollout_metrics(names, rewards, r, r)


def test_failures_are_counted_and_left_out_of_the_means():
    metrics = metrics_of([1.0, NAN, 0.0, 0.0], [NAN, NAN, NAN, 2.0], [0.0, 0.0, 0.0, 0.0])
    assert [metrics[f"reward/{name}/failed"] for name in "abc"] == [1, 3, 0]
    assert [metrics[f"reward/{name}/mean"] for name in "abc"] == pytest.approx([1 / 3, 2, 0])


def test_too_many_failures_stop_the_run_with_a_sentence():
    metrics = metrics_of([1.0, NAN, NAN, 0.0], [NAN, NAN, NAN, 2.0])
    check_failures(["a"], metrics, 4, 0.5)  # b is not trained on; half is not more than half
    check_failures(["a", "b"], metrics, 4, 1.0)
    with pytest.raises(
        UserError, match="^Reward 'b' could not score 3 of the 4 images of rollout 3, .* 0.5 .*say why.$"
    ):
        check_failures(["a", "b"], metrics, 4, 0.5)
    with pytest.raises(UserError, match="Reward 'a' could not score 2 of the 4"):
        check_failures(["a", "b"], metrics, 4, 0.0)


def test_rewards_that_tell_nothing_apart_are_found():
    rewards = torch.tensor([[0.5, 0.5, NAN, NAN], [0.5, NAN, NAN, 0.1], [0.5, 0.6, NAN, NAN]])
    assert constant_rewards(["same", "differs", "failed", "single"], rewards) == {"same": 0.5}
    assert constant_rewards(["zero"], torch.tensor([[0.0], [NAN], [0.0]])) == {"zero": 0.0}


def tables(section: str) -> dict[str, torch.Tensor]:
    """The tables of a section by their corner, as tensors; "–" is NaN."""
    found = {}
    for corner, body in re.findall(r"^\| ([^|]+) \|[^\n]+\n\|[-|]+\n((?:\|[^\n]+\n)+)", section, re.M):
        cells = [line.strip("|").split("|")[1:] for line in body.replace("−", "-").replace("–", "nan").splitlines()]
        found[corner] = torch.tensor([[float(cell) for cell in row] for row in cells], dtype=torch.float64)
    return found


def test_the_page_from_score_to_r_prints_what_the_functions_give():
    text = PAGE.read_text(encoding="utf-8")
    given, sums, each, failed = (tables(part) for part in re.split(r"^## ", text, flags=re.M)[:4] if part)
    clip = float(re.search(r"c = ([\d.]+), so", text)[1])
    budgets = {name: float(value) for name, value in re.findall(r"(clip|ocr|geneval) (\d)\b", text)[:3]}
    weights, none = given["T·W"] / 3, torch.ones(3, 3)
    credit = CreditMatrix(weights, budgets, "recast", none, none)
    assert max(credit.residuals) < 1e-12
    scores, groups = given["score"], torch.zeros(4, dtype=torch.long)

    def same(printed, computed):
        torch.testing.assert_close(printed, computed, atol=5.001e-4, rtol=0, equal_nan=True)

    def with_statistics(x):
        return torch.cat([x, x.mean(0, keepdim=True), x.std(0, correction=0, keepdim=True)])

    def advantages(x, aggregation):
        return level_advantages(x, credit.level_weights, groups, aggregation=aggregation)

    same(sums["r_t"], with_statistics(scores @ credit.level_weights))
    own = group_advantages(scores, groups)
    same(each["reward"], with_statistics(scores)[4:])
    same(each["A_i"], own)
    total = own @ credit.level_weights
    same(each["S_t"], torch.cat([total, total.square().mean(0, keepdim=True).sqrt()]))
    for printed, aggregation in ((sums, "sum"), (each, "per_reward")):
        same(printed["A_t"], advantages(scores, aggregation))
        same(printed["r"], optimality_probability(advantages(scores, aggregation), clip))
    scores[3, 1] = NAN
    same(failed["A_i"], group_advantages(scores, groups))
    for aggregation in ("sum", "per_reward"):
        same(failed[f"r, `{aggregation}`"], optimality_probability(advantages(scores, aggregation), clip))
