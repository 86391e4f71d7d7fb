"""Settings of a checkpoint against those of the run that goes on: what may differ, what may not, and old formats."""

import pytest

from recast_lightning.checkpointing.compatibility import check_settings
from recast_lightning.checkpointing.renamed import RENAMED
from recast_lightning.checkpointing.run_state import FORMAT
from recast_lightning.checkpointing.settings import COMPARED, EVALUATION, FREE, MODEL, WITHIN_ROLLOUT
from recast_lightning.errors import UserError

NOW = {name: 1 for name in (*MODEL, *COMPARED, *WITHIN_ROLLOUT, *FREE)} | {"rewards.clip.model": 1}
OLD_NAMES = {new: old for old, new in RENAMED.items()}


def theirs(changes=None, form=FORMAT):
    return {"format": form, "settings": NOW | (changes or {})}


@pytest.mark.parametrize("within", [False, True])
def test_the_same_settings_say_nothing(within):
    assert check_settings(theirs(), NOW, within) == ([], False)


def test_a_checkpoint_of_the_time_before_the_groups_is_read_by_its_old_names():
    before = {OLD_NAMES.get(name, name): value for name, value in NOW.items()}
    assert {"model.beta", "model.learning_rate", "model.timestep_fraction"} <= before.keys()
    assert check_settings({"settings": before}, NOW, True) == ([], False)
    assert check_settings({"settings": before | {"model.beta": 2}}, NOW, True)[0] == ["model.objective.beta 2 → 1"]


def test_what_an_older_format_did_not_keep_is_not_compared():
    before = {name: value for name, value in NOW.items() if name not in COMPARED}
    assert check_settings({"format": 2, "settings": before | {"data.old": 3}}, NOW, True) == ([], False)
    with pytest.raises(UserError, match="policy.solver is 'absent' in the checkpoint"):
        check_settings({"format": FORMAT, "settings": before}, NOW, False)


def test_a_format_of_a_later_version_is_refused():
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, and this version .* reads up to {FORMAT}"):
        check_settings(theirs(form=FORMAT + 1), NOW, False)


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("name", MODEL)
def test_another_model_is_refused(name, accept):
    with pytest.raises(UserError, match=f"{name} is 2 in the checkpoint and 1 in .*: that is another model"):
        check_settings(theirs({name: 2}), NOW, False, accept)


@pytest.mark.parametrize("name", [*COMPARED, "rewards.clip.model", "rewards.aesthetic.class"])
def test_what_makes_numbers_incomparable_is_refused_unless_it_is_accepted(name):
    now = NOW.get(name, "absent")
    with pytest.raises(UserError, match=f"{name} is 2 .* could not be compared: .* or add --accept-changes"):
        check_settings(theirs({name: 2}), NOW, False)
    anew = name != "training prompts"
    assert check_settings(theirs({name: 2}), NOW, False, accept_changes=True) == ([f"{name} 2 → {now!r}"], anew)


@pytest.mark.parametrize("name", WITHIN_ROLLOUT)
def test_what_shapes_a_rollout_may_change_between_rollouts_only(name):
    given = theirs({name: 2})
    assert check_settings(given, NOW, False, True) == ([f"{name} 2 → 1"], name in EVALUATION)
    with pytest.raises(UserError, match=f"{name} is 2 .* written within a rollout"):
        check_settings(given, NOW, True, True)


@pytest.mark.parametrize("name", [*FREE, "versions.torch", "profiler.posterior", "stages.warmup.epochs"])
def test_what_may_change_is_said(name):
    assert check_settings(theirs({name: 2}), NOW | {name: 1}, True) == ([f"{name} 2 → 1"], False)
