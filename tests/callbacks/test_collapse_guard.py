"""CollapseGuard speaks once of each sign of collapse, and of nothing else."""

import json
import math
import warnings

import pytest

from recast_lightning.callbacks import CollapseGuard
from recast_lightning.credit import Stage
from recast_lightning.errors import UserError
from recast_lightning.policy import Policy
from recast_lightning.rewards import OCR, ClipScore
from recast_lightning.training import RecastModule


@pytest.fixture
def module():
    stages = [Stage("one", 50, {"clip": 1.0, "ocr": 1.0, "extra": 0.0}), Stage("two", 50, {"ocr": 1.0})]
    rewards = {"clip": ClipScore("signboard:clip"), "ocr": OCR(), "extra": ClipScore("signboard:clip")}
    return RecastModule(Policy(), rewards, stages)


def watch(guard, module, *, clip=(), ocr=(), std=0.1, deviation=0.01, start=0):
    """Show rollouts, each for two micro-batches; what was warned of, with the rollout."""
    said = []
    for i, (a, b) in enumerate(zip(clip, ocr, strict=True)):
        rollout = start + i
        module.run_state.metrics = {
            "rollout": rollout + 1.0, "stage": float(module.credit.stage_index(rollout)),
            "reward/clip/mean": a, "reward/ocr/mean": b,
            "rollout/image_std": std[i] if isinstance(std, list) else std,
            "rollout/deviation": deviation[i] if isinstance(deviation, list) else deviation,
        }  # fmt: skip
        for batch in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                guard.on_train_batch_start(None, module, None, batch)
            said += [(rollout + 1, str(w.message)) for w in caught]
    return said


FALLING = [0.80, 0.82, 0.81, 0.70, 0.60, 0.50, 0.40]
NOISY = [0.80, 0.60, 0.81, 0.62, 0.79, 0.61, 0.70]


def test_all_rewards_falling_is_said_once_and_only_beyond_noise(module):
    said = watch(CollapseGuard(window=3), module, clip=FALLING, ocr=FALLING)
    assert [rollout for rollout, _ in said] == [6]
    assert said[0][1].startswith(
        "Collapse in rollout 6: all rewards of the stage have fallen by more than 3 standard errors"
    )
    assert "clip 0.81 → 0.6, ocr 0.81 → 0.6" in said[0][1]
    for other in (NOISY, sorted(FALLING), [math.nan] * 7, [0.5] * 7):
        assert watch(CollapseGuard(window=3), module, clip=FALLING, ocr=other) == []
    assert watch(CollapseGuard(window=4), module, clip=FALLING, ocr=FALLING) == []


def test_a_stage_is_compared_with_its_own_start(module):
    guard = CollapseGuard(window=2)
    rows = [0.9, 0.9, 0.5, 0.5, 0.4, 0.41]
    assert watch(guard, module, clip=rows, ocr=[0.1, 0.12] * 3, start=48) == []
    assert watch(guard, module, clip=[0] * 2, ocr=[0.1, 0.12], start=54) == []
    said = watch(guard, module, clip=[0] * 2, ocr=[0.0, 0.0], start=56, std=0.05)
    assert [rollout for rollout, _ in said] == [58]
    assert "clip" not in said[0][1]


def test_images_that_become_alike_and_a_policy_that_runs_away_are_said_once_each(module):
    flat = [0.5] * 5
    said = watch(CollapseGuard(), module, clip=flat, ocr=flat, std=[0.2, 0.15, 0.061, 0.059, 0.01])
    assert [rollout for rollout, _ in said] == [4]
    assert "images of a prompt have become alike (rollout/image_std 0.2 → 0.059, below min_image_std 0.3" in said[0][1]
    said = watch(CollapseGuard(), module, clip=flat, ocr=flat, deviation=[0.0, 0.4, 0.51, 0.6, math.nan])
    assert [rollout for rollout, _ in said] == [3]
    assert "left its reference (rollout/deviation 0.51, above max_deviation 0.5)" in said[0][1]


def test_stop_ends_the_run(module):
    with pytest.raises(
        UserError, match="Collapse in rollout 2: the policy has left .* this rollout was not trained on"
    ):
        watch(CollapseGuard("stop"), module, clip=[1, 1], ocr=[1, 1], deviation=[0.0, 0.9])


@pytest.mark.parametrize("cut", [1, 3, 5, 6])
def test_a_resumed_guard_says_what_one_that_went_on_says(module, cut):
    std = [0.2, 0.2, 0.2, 0.2, 0.05, 0.05, 0.05]
    straight = watch(CollapseGuard(window=3), module, clip=FALLING, ocr=FALLING, std=std)
    first, second = CollapseGuard(window=3), CollapseGuard(window=3)
    said = watch(first, module, clip=FALLING[:cut], ocr=FALLING[:cut], std=std)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again = cut - 1  # resumed inside a rollout: it is drawn again
    said += watch(second, module, clip=FALLING[again:], ocr=FALLING[again:], std=std[again:], start=again)
    assert said == straight
    assert len(straight) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"action": "halt"}, "action must be 'warn' or 'stop', got 'halt'"),
        ({"window": 1}, "window must be at least 2 rollouts, got 1"),
        ({"errors": 0}, "errors must be above 0, got 0"),
        ({"min_image_std": 1}, r"min_image_std must be in \[0, 1\), got 1"),
        ({"max_deviation": -1}, "max_deviation must be above 0, got -1"),
    ],
)
def test_options_outside_their_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        CollapseGuard(**option)
