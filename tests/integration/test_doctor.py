"""`recast doctor` examines every part for itself, and its exit code says whether one fails."""

import json

import pytest
import torch
from integration.tiny import config

from recast_lightning.cli import main
from recast_lightning.cli.doctor import check_picture, score_key, stored_scores
from recast_lightning.rewards import ClipScore, RewardModel


def doctor(file, capsys, *arguments):
    """The printed table in one line, and the exit code."""
    code = 0
    try:
        main(["doctor", "--config", str(file), *arguments])
    except SystemExit as stop:
        code = stop.code
    return " ".join(capsys.readouterr().out.replace("│", " ").split()), code


def test_the_embedded_configuration_is_healthy(tmp_path, capsys):
    text, code = doctor(config(tmp_path), capsys)
    assert code == 0
    assert "FAILED" not in text
    assert "note" not in text.split()
    assert text.count("as stored") == 5
    for part in ("devices", "policy", "prompts", "reward ocr", "proposals", "logger CSVLogger"):
        assert f"{part} ok" in text


def test_all_faults_show_at_once(tmp_path, capsys):
    file = config(
        tmp_path,
        model__policy__init_args__path="/nowhere",
        model__rewards__clip__init_args__model="/gone",
        data__validation="signboard:test:0",
    )
    text, code = doctor(file, capsys)
    assert code == 1
    assert text.count("FAILED") >= 3
    for part in ("policy FAILED", "prompts FAILED", "reward clip FAILED", "reward hpsv2 ok"):
        assert part in text


def test_another_checkpoint_under_the_same_name_is_noticed(tmp_path, capsys, monkeypatch):
    key = score_key(ClipScore("signboard:clip"))
    wrong = {**stored_scores(), key: stored_scores()[key] + 0.01}
    monkeypatch.setattr("recast_lightning.cli.doctor.stored_scores", lambda: wrong)
    text, code = doctor(config(tmp_path), capsys)
    assert code == 1
    assert "is stored: another checkpoint?" in text


class Silent(RewardModel):
    name = "silent"

    def score(self, images, prompts):
        return torch.full((len(images),), torch.nan)


def test_a_reward_that_cannot_score_fails_and_an_unknown_one_is_noted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ClipScore, "score", Silent.score)
    monkeypatch.setattr("recast_lightning.cli.doctor.stored_scores", dict)
    text, code = doctor(config(tmp_path), capsys)
    assert code == 1
    assert "it could not score the bundled picture (NaN)" in text
    assert "reward ocr note" in text


def test_nothing_is_loaded_when_not_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ClipScore, "load", lambda self: pytest.fail("loaded"))
    text, code = doctor(config(tmp_path), capsys, "--load", "false")
    assert code == 0
    assert "its files are there" in text


def test_the_bundled_picture_has_what_every_reward_needs():
    image, prompt = check_picture()
    assert image.shape == (1, 3, 64, 64)
    assert {"ocr", "include"} <= prompt.metadata.keys()
    assert json.loads(json.dumps(stored_scores())) == stored_scores()
