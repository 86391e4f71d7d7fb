"""Bad input: one sentence, exit code 2, before any model is loaded."""

import pytest
from integration.tiny import config

from recast_lightning.cli import main
from recast_lightning.policy import Policy

CASES = {
    "misspelt key": ({"model__betta": 0.1}, "betta"),
    "misspelt data key": ({"data__groupsize": 4}, "groupsize"),
    "unknown reward class": ({"model__rewards__clip": {"class_path": "recast_lightning.rewards.ClopScore"}}, "ClopScore"),
    "misspelt reward option": ({"model__rewards__clip__init_args__modell": "x"}, "modell"),
    "negative budget": ({"model__stages__0__budgets": {"clip": -1}}, "budget of 'clip' must be a number ≥ 0, got -1.0"),
    "budget for an absent reward": ({"model__stages__0__budgets": {"aesthetic": 1}}, "no such reward"),
    "budget that is a word": ({"model__stages__0__budgets": {"clip": "much"}}, "much"),
    "missing policy path": ({"model__policy__init_args__path": "./nowhere"}, "'./nowhere' does not exist"),
    "missing reward path": ({"model__rewards__clip__init_args__model": "./nowhere"}, "./nowhere"),
    "missing prompt file": ({"data__train": "nowhere.txt"}, "nowhere.txt does not exist"),
    "malformed source": ({"data__train": "signboard:train"}, "SPLIT:COUNT"),
    "micro-batch that does not divide": ({"model__micro_batch_size": 3}, "take 2 or 4"),
    "group of one": ({"data__group_size": 1}, "group_size must be at least 2, got 1"),
    "too many prompts": ({"data__prompts_per_rollout": 40}, "has only 12"),
    "too many epochs": ({"trainer__max_epochs": 9}, "only 3 rollouts"),
    "unknown credit": ({"model__stages__0__credit": "magic"}, "magic"),
    "no profiler": ({"trainer__callbacks": []}, "add RenyiProfilerCallback"),
    "missing profile": ({"trainer__callbacks__0__init_args__profile": "nowhere"}, "nowhere"),
    "a device that is none": ({"model__reward_device": "gpu0"}, "reward_device is 'gpu0': expected cpu, cuda"),
    "failure share": ({"model__failure_share": 2}, "failure_share must be in [0, 1], got 2"),
    "aggregation": ({"model__aggregation": "mean"}, "mean"),
    "negative workers": ({"model__num_workers": -1}, "num_workers must be at least 0, got -1"),
    "levels of a profile": ({"trainer__callbacks__0__init_args__levels": 6}, "levels must be 2 to 3"),
    "nested order, one rollout": ({"trainer__callbacks__0__init_args__order": 1.0}, "Order 1 needs at least 2 rollouts"),
    "a signed reward to be measured": (
        {"model__rewards__clip": {"class_path": "recast_lightning.rewards.HTTPReward",
                                  "init_args": {"url": "http://localhost:1"}}},
        "http can score below 0 (down to -inf)",
    ),
    "a template that is not there": (
        {"model__rewards__clip": {"class_path": "recast_lightning.rewards.HPSv3", "init_args": {"template": "./nowhere"}}},
        "./nowhere",
    ),
    "missing proposals": (
        {"trainer__callbacks__0__init_args__proposals": {
            "class_path": "recast_lightning.proposals.FolderProposals", "init_args": {"path": "nowhere"}}},
        "metadata.jsonl",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded before the configuration was checked")

    monkeypatch.setattr(Policy, "load", load)


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_one_sentence(case, tmp_path, capsys):
    changes, expected = CASES[case]
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config(tmp_path, **changes))])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert expected in error
    assert error.startswith("recast: error: ")
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


def test_prompts_without_a_target_are_refused_when_ocr_is_used(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text('a sign that says "TAN"\na dog\n')
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config(tmp_path, data__train=str(tmp_path / "prompts.txt")))])
    assert "line 2" in capsys.readouterr().err


def test_a_missing_configuration_file_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "nowhere.yaml"])
    assert stop.value.code == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["fit", "--help"], ["report", "--help"], ["signboard", "pretrain", "--help"]]
)
def test_help_is_there(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "usage" in capsys.readouterr().out
