import pytest
import torch

from recast_lightning.data import PromptDataModule, ShardedBatches, load_prompts
from recast_lightning.rollout import check_sizes, plan_samples


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
        ((1, 4, 4, 2), "take 2 or 2"),
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
    shards = [ShardedBatches(7, 2, rank, world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    items = [item for shard in shards for chunk in shard for item in chunk]
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
