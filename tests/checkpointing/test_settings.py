"""What shapes a run's numbers, by name."""

from dataclasses import replace

import torch

from recast_lightning.checkpointing.settings import describe, prompts_by_content, read_settings
from recast_lightning.prompts import Prompt
from recast_lightning.rewards import OCR, GenEval, HTTPReward, PickScore, SignboardDetector

PROMPTS = [Prompt("a red star", {"ocr": "NO", "include": [{"class": "star"}]}), Prompt("a blue star")]


def test_an_object_is_described_by_class_version_and_options_without_those_of_speed():
    found = describe(PickScore("signboard:pickscore", batch_size=3))
    assert found == describe(PickScore("signboard:pickscore", batch_size=5))
    assert found["class"] == "PickScore"
    assert found["model"] == "signboard:pickscore"
    assert found != describe(PickScore("signboard:clip"))
    assert describe(OCR(detect=False)) != describe(OCR())
    assert describe(HTTPReward("http://a:1")) == describe(HTTPReward("http://b:2", timeout=9.0))
    assert describe(HTTPReward("http://a:1", version="1")) != describe(HTTPReward("http://a:1", version="2"))


def test_what_an_object_holds_is_described_too():
    found = describe(GenEval(SignboardDetector(), mode="strict"))
    assert found["detector"]["class"] == "SignboardDetector"
    assert read_settings({}, {"rewards": {"g": found}})["rewards.g.detector.class"] == "SignboardDetector"
    assert describe({"a": (1, torch.zeros(2)), "b": None}) == {"a": [1, "Tensor"], "b": None}


def test_prompts_are_told_apart_by_content():
    known = prompts_by_content(PROMPTS)
    assert known.startswith("2 (")
    assert prompts_by_content(list(PROMPTS)) == known
    others = ([*PROMPTS, PROMPTS[0]], PROMPTS[::-1], [replace(PROMPTS[0], metadata={"ocr": "ON"}), PROMPTS[1]])
    assert all(prompts_by_content(other) != known for other in others)
