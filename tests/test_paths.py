"""Weights that are not there: one sentence that says what to do, whichever library asked for them."""

from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from integration import tiny

from recast_lightning.cli import main
from recast_lightning.errors import UserError
from recast_lightning.paths import expand_home, reading
from recast_lightning.policy import Policy
from recast_lightning.rewards import ClipScore, GenEval, HPSv2, Mask2FormerDetector, PickScore

NAME = "stabilityai/stable-diffusion-3.5-medium"


ERRORS = {
    "no licence": (
        GatedRepoError("403 Client Error.", response=Mock()),
        "accept its licence on https://hugging",
    ),
    "no such name": (RepositoryNotFoundError("401 Client Error.", response=Mock()), "check the name"),
    "not in the cache": (LocalEntryNotFoundError("Cannot find the requested files."), f"run `hf download {NAME}`"),
    "offline": (OfflineModeIsEnabled("Cannot reach the hub."), "HF_HUB_OFFLINE is set and the cache lacks it"),
    "no network": (HTTPError("Name or service not known"), f"run `hf download {NAME}`"),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "wrapped by transformers or diffusers"])
@pytest.mark.parametrize("case", ERRORS)
def test_each_error_of_the_hub_says_what_to_do(case, wrapped):
    error, advice = ERRORS[case]
    if wrapped:
        error, error.__cause__ = OSError("Something long.\nOn two lines."), error
    with pytest.raises(UserError) as caught, reading("The policy found no pipeline", NAME):
        raise error
    message = str(caught.value)
    assert message.startswith(f'The policy found no pipeline in "{NAME}", neither here nor on the hub: ')
    assert advice in message
    assert message.endswith("or give a local folder.")
    assert "\n" not in message
    assert ("HF_TOKEN" in message) == (case in ("no licence", "no such name"))


def test_the_cache_alone_is_to_blame_only_if_offline(monkeypatch):
    for value, why in (("1", "HF_HUB_OFFLINE is set"), ("0", "the hub cannot be reached")):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        with pytest.raises(UserError, match=f"{why} and the cache"), reading("x found no model", "a/b"):
            raise LocalEntryNotFoundError("Cannot find the requested files.")


def test_what_is_wrong_with_a_local_folder_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match='clip_score found no model of the type "clip" in .* not a valid JSON'):
        ClipScore(str(tmp_path), processor="signboard:clip").load()


@pytest.mark.parametrize(
    "reward",
    [
        ClipScore("nobody/nothing"),
        HPSv2("nobody/nothing", processor="signboard:clip"),
        PickScore("nobody/nothing", processor="signboard:clip"),
        GenEval(Mask2FormerDetector("nobody/nothing", clip="signboard:clip")),
    ],
    ids=lambda reward: reward.name,
)
def test_rewards_that_are_not_in_the_cache_say_so(reward):
    with pytest.raises(
        UserError, match='in "nobody/nothing", neither here nor on the hub: .* run `hf download nobody/no'
    ):
        reward.load()


@pytest.mark.parametrize("case", ["no licence", "not in the cache"])
def test_the_command_line_prints_that_sentence_alone(case, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise ERRORS[case][0]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.chdir(tmp_path)
    config = tiny.config(tmp_path, model__policy__init_args__path=NAME, model__policy__init_args__max_sequence_length=8)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", str(config)])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert lines[-1].startswith("recast: error: The policy found no pipeline")
    assert ERRORS[case][1] in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("path", "sides", "message"),
    [
        ("signboard:base", {"height": 60}, "height is 60, but .* multiples of 8 pixels up to .*: take 56 or 64"),
        ("signboard:base", {"width": 4}, "width is 4, but .* take 8 or 16"),
    ],
)
def test_sides_that_the_policy_cannot_draw_are_refused(path, sides, message):
    with pytest.raises(ValueError, match=message):
        Policy(path, max_sequence_length=8, **sides).validate()
    Policy(path, height=48, width=64, max_sequence_length=8).validate()


def test_home_is_found_at_any_depth(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    options = Namespace(
        path="~/a", number=1, none=None, part=Namespace(folder=Path("~/b"), names=["~", "x~/y", {"c": "~/c"}])
    )
    expanded = expand_home(options)
    assert expanded is options
    assert options.path == "/home/me/a"
    assert options.part.folder == Path("/home/me/b")
    assert options.part.names == ["/home/me", "x~/y", {"c": "/home/me/c"}]
    assert (options.number, options.none) == (1, None)
