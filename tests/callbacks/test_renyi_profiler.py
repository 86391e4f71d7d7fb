"""What RenyiProfilerCallback leaves where W cannot be built."""

from types import SimpleNamespace

import pytest
from helpers.profiles import assert_same, make_profile

from recast_lightning.callbacks import RenyiProfilerCallback
from recast_lightning.credit import Profile, Stage
from recast_lightning.errors import UserError
from recast_lightning.proposals import RendererProposals
from recast_lightning.rewards import OCR, ClipScore
from recast_lightning.training import RecastModule


@pytest.mark.parametrize(("rollout", "folder"), [(0, "stages/1-all"), (1, "stages/1-all/rollout-1")])
def test_a_profile_is_kept_where_no_w_can_be_built_from_it(policy, tmp_path, monkeypatch, rollout, folder):
    """A profile is hours of work, and the temperature that spoils W is one word."""
    module = RecastModule(policy, {"ocr": OCR(), "clip": ClipScore()}, [Stage("all", 2, {"ocr": 1.0, "clip": 1.0})])
    module.credit.credit_stage = rollout - 1  # in rollout 1, the stage has begun
    measured = make_profile(("ocr", "clip"), 3, sigmas=policy.sigmas)
    callback = RenyiProfilerCallback(RendererProposals(), refresh=1, temperature=1e-310)
    monkeypatch.setattr(callback, "measure", lambda *args: measured)
    trainer = SimpleNamespace(current_epoch=rollout, loggers=[1], log_dir=str(tmp_path), is_global_zero=True)
    with pytest.raises(UserError, match=r"^Stage 'all' has no W: temperature 1e-310 is too small.*kept: give") as said:
        callback.on_train_epoch_start(trainer, module)
    kept = tmp_path / folder / "profile"
    assert str(kept) in str(said.value)
    assert_same(Profile.load(kept), measured)
