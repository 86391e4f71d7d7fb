"""Settings of a checkpoint against those of the run that goes on: what may differ, what may not, and old formats."""

import pytest

from recast_lightning.checkpointing.compatibility import FREE, MODEL, WITHIN_ROLLOUT, check_settings
from recast_lightning.checkpointing.renamed import RENAMED
from recast_lightning.checkpointing.run_state import FORMAT
from recast_lightning.errors import UserError

NOW = {name: 1 for name in (*MODEL, *WITHIN_ROLLOUT, *FREE)}
OLD_NAMES = {new: old for old, new in RENAMED.items()}


@pytest.mark.parametrize("within", [False, True])
def test_the_same_settings_say_nothing(within):
    assert check_settings({"format": FORMAT, "settings": NOW}, NOW, within) == []


def test_a_checkpoint_of_the_time_before_the_groups_is_read_by_its_old_names():
    before = {OLD_NAMES.get(name, name): value for name, value in NOW.items()}
    assert {"model.beta", "model.learning_rate", "model.timestep_fraction"} <= before.keys()
    assert check_settings({"settings": before}, NOW, True) == []
    assert check_settings({"settings": before | {"model.beta": 2}}, NOW, True) == ["model.objective.beta 2 → 1"]


def test_a_format_of_a_later_version_is_refused():
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, and this version .* reads up to {FORMAT}"):
        check_settings({"format": FORMAT + 1, "settings": NOW}, NOW, False)


@pytest.mark.parametrize("name", MODEL)
def test_another_model_is_refused(name):
    with pytest.raises(UserError, match=f"{name} is 2 in the checkpoint and 1 in .*: that is another model"):
        check_settings({"settings": NOW | {name: 2}}, NOW, False)


@pytest.mark.parametrize("name", WITHIN_ROLLOUT)
def test_what_shapes_a_rollout_may_change_between_rollouts_only(name):
    theirs = {"settings": NOW | {name: 2}}
    assert check_settings(theirs, NOW, within_rollout=False) == [f"{name} 2 → 1"]
    with pytest.raises(UserError, match=f"{name} is 2 .* written within a rollout"):
        check_settings(theirs, NOW, within_rollout=True)


@pytest.mark.parametrize("name", FREE)
def test_what_may_change_is_said(name):
    assert check_settings({"settings": NOW | {name: 2}}, NOW, True) == [f"{name} 2 → 1"]
