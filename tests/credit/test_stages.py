import pytest

from recast_lightning.credit.stages import Stage, check_stages, stage_index

REWARDS = ("clip", "ocr")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages is empty"),
        ([Stage("a", 0, {"clip": 1.0})], "epochs must be at least 1, got 0"),
        ([Stage("a", 1, {"clip": -1.0})], "budget of 'clip' must be a number ≥ 0, got -1.0"),
        ([Stage("a", 1, {"clip": float("nan")})], "budget of 'clip' must be a number"),
        ([Stage("a", 1, {"clip": 0.0})], "at least one budget must be above 0"),
        ([Stage("a", 1, {"clipp": 1.0})], "no such reward; configured are clip, ocr"),
        ([Stage("a", 1, {"clip": 1.0})] * 2, "must be unique"),
        ([Stage("a/b", 1, {"clip": 1.0})], "made of letters"),
    ],
)
def test_stages_that_cannot_be_trained_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        check_stages(stages, REWARDS)


def test_rollouts_belong_to_stages_in_order():
    stages = [Stage("a", 2, {"clip": 1.0}), Stage("b", 1, {"ocr": 1.0})]
    check_stages(stages, REWARDS)
    assert [stage_index(stages, rollout) for rollout in range(4)] == [0, 0, 1, 1]
