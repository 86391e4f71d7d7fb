"""A W a stage: used for its rollouts, refused for others, kept by checkpoints."""

import pytest
import torch

from recast_lightning.credit import CreditMatrix, CreditSchedule, Stage

SIGMAS = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)


@pytest.fixture
def schedule():
    stages = [Stage("one", 2, {"clip": 1.0}, "static"), Stage("two", 1, {"clip": 1.0, "ocr": 2.0})]
    return CreditSchedule(stages, ["clip", "ocr"])


def measured(levels=2):
    gains = torch.arange(1.0, 2 * levels + 1).reshape(2, levels)
    return CreditMatrix.from_gains(gains, {"clip": 1.0, "ocr": 2.0})


def test_a_static_stage_has_a_flat_w_which_is_built_once(schedule):
    credit = schedule.current(0, SIGMAS)
    assert torch.equal(credit.level_weights, torch.ones(1, 2, dtype=torch.float64))
    assert schedule.current(1, SIGMAS) is credit
    assert schedule.credit_stage == 0


def test_a_measured_stage_needs_a_w_and_keeps_it(schedule):
    schedule.current(0, SIGMAS)
    with pytest.raises(RuntimeError, match="'two' has no W yet: add RenyiProfilerCallback"):
        schedule.current(2, SIGMAS)
    credit = measured()
    schedule.set(credit, rollout=2, num_levels=2)
    assert schedule.current(2, SIGMAS) is credit
    assert schedule.current(7, SIGMAS) is credit  # past the end, the last stage goes on


def test_w_of_other_rewards_or_levels_is_refused(schedule):
    with pytest.raises(ValueError, match="W is for clip, ocr at 2 levels, but stage 'one' trains clip at 2"):
        schedule.set(measured(), rollout=0, num_levels=2)
    with pytest.raises(ValueError, match="W is for clip, ocr at 3 levels"):
        schedule.set(measured(3), rollout=2, num_levels=2)


def test_what_is_saved_is_restored(schedule):
    assert schedule.state_dict() == {"credit_stage": -1, "credit": None}
    schedule.set(measured(), rollout=2, num_levels=2)
    other = CreditSchedule(schedule.stages, ["clip", "ocr"])
    other.load_state_dict(schedule.state_dict())
    assert torch.equal(other.current(2, SIGMAS).weights, schedule.current(2, SIGMAS).weights)
