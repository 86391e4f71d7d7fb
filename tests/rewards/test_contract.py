"""What every reward model promises, checked on each of them."""

import copy
import inspect
import logging
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_blip, tiny_clip, tiny_qwen2vl
from helpers.pictures import sign
from PIL import Image
from torch import nn

from recast_lightning.errors import UserError
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import (
    OCR,
    Aesthetic,
    ClipScore,
    GenEval,
    HPSv2,
    HPSv3,
    ImageReward,
    PickScore,
    RewardModel,
    SignboardDetector,
)

NAMES = (
    "clip_score",
    "hpsv2",
    "pickscore",
    "ocr",
    "ocr_lines",
    "geneval",
    "aesthetic",
    "image_reward",
    "hpsv3",
)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip")
    tiny_clip.save_transformers(path, quick_gelu=True)
    head = {f"layers.{key}": value for key, value in tiny_blip.published_head(tiny_clip.EMBED).state_dict().items()}
    torch.save(head, path / "aesthetic-model.pth")
    blip, qwen = tmp_path_factory.mktemp("blip"), tmp_path_factory.mktemp("qwen")
    torch.save(tiny_blip.ReferenceImageReward().state_dict(), blip / "ImageReward.pt")
    tiny_blip.save_tokenizer(blip)
    tiny_qwen2vl.save_hpsv3(qwen)
    return {
        "clip_score": ClipScore(str(path)),
        "hpsv2": HPSv2(str(path)),
        "pickscore": PickScore(str(path)),
        "ocr": OCR(min_side=128),
        "ocr_lines": OCR(detect=False),
        "geneval": GenEval(SignboardDetector()),
        "aesthetic": Aesthetic(str(path), str(path)),
        "image_reward": ImageReward(str(blip), tokenizer=str(blip)),
        "hpsv3": HPSv3(str(qwen), base=str(qwen / "base"), template=str(qwen / "template.txt"), dtype="float32"),
    }


@pytest.fixture(params=NAMES)
def reward(request, rewards):
    reward = rewards[request.param]
    reward.failed = 0
    reward._reported.clear()
    return reward


def prompt(shape, color, count, word):
    include = [{"class": shape, "count": count, "color": color}]
    metadata = {"tag": "colors", "include": include, "ocr": word, "text_region": [0, 0.5, 1, 1]}
    return Prompt(f'a sign with {count} {color} {shape} and "{word.lower()}"', metadata)


IMAGES = torch.stack(
    [
        sign([("circle", "red", 20, 15, 18)], "KAT"),
        sign([("star", "blue", 20, 15, 18), ("star", "blue", 44, 15, 18)], "NOT"),
        sign([("square", "green", 20, 15, 18), ("square", "blue", 44, 15, 18)], "VEN"),
        sign([]),
    ]
)
PROMPTS = [
    prompt("circle", "red", 1, "KAT"),
    prompt("star", "blue", 2, "NIT"),
    prompt("square", "green", 2, "LU"),
    prompt("star", "red", 1, "TO"),
]


def test_scores_are_plain_numbers(reward):
    scores = reward(IMAGES, PROMPTS)
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32
    assert scores.device.type == "cpu"
    assert not scores.requires_grad
    low, high = reward.score_range
    assert ((low <= scores) & (scores <= high)).all()
    assert len(set(scores.tolist())) > 2
    assert reward.failed == 0
    assert torch.equal(scores, reward(IMAGES, PROMPTS))


def test_known_scores(rewards):
    assert rewards["ocr"](IMAGES, PROMPTS).tolist() == pytest.approx([1, 2 / 3, 0, 0])
    assert rewards["ocr_lines"](IMAGES, PROMPTS).tolist() == pytest.approx([1, 2 / 3, 0, 0])
    assert rewards["geneval"](IMAGES, PROMPTS).tolist() == [1, 1, 0.75, 0]


def test_order_and_batch_do_not_matter(reward):
    together = reward(IMAGES, PROMPTS)
    single = torch.cat([reward(IMAGES[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, single, atol=5e-6, rtol=0)
    torch.testing.assert_close(reward(IMAGES.flip(0), PROMPTS[::-1]).flip(0), together, atol=5e-6, rtol=0)


def test_bytes_floats_and_halves_agree(reward):
    scores = reward(IMAGES, PROMPTS)
    for images in (IMAGES.float() / 255, IMAGES.double() / 255):
        torch.testing.assert_close(reward(images, PROMPTS), scores, atol=1e-6, rtol=0)
    torch.testing.assert_close(reward(IMAGES.half() / 255, PROMPTS), scores, atol=1e-2, rtol=0)


def test_pil_images_score_like_tensors(reward):
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in IMAGES]
    torch.testing.assert_close(reward(pictures, PROMPTS), reward(IMAGES, PROMPTS), atol=5e-6, rtol=0)
    torch.testing.assert_close(
        reward([p.convert("RGBA") for p in pictures], PROMPTS), reward(IMAGES, PROMPTS), atol=5e-6, rtol=0
    )
    assert reward([], []).shape == (0,)
    with pytest.raises(ValueError, match=r"different sizes, such as \(32, 64\) and \(64, 64\): score each size apart"):
        reward([pictures[0], pictures[1].crop((0, 0, 32, 64))], PROMPTS[:2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_images_score_nan(reward, bad, caplog):
    images = IMAGES.float() / 255
    expected = reward(images, PROMPTS)
    images[1, 0, 5, 5] = bad
    with caplog.at_level(logging.WARNING):
        scores = reward(images, PROMPTS)
        reward(images, PROMPTS)
    assert scores.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(scores[[0, 2, 3]], expected[[0, 2, 3]], atol=1e-6, rtol=0)
    assert reward.failed == 2
    assert sum("NaN or infinite pixels" in record.getMessage() for record in caplog.records) == 1


def test_weights_stay_out_of_the_module_tree(reward):
    module = nn.ModuleDict({"reward": reward})
    reward.load()
    assert len(module.state_dict()) == 0
    assert list(module.parameters()) == []
    assert list(module.buffers()) == []


def test_module_casts_and_training_mode_do_not_change_scores(reward):
    expected = reward(IMAGES, PROMPTS)
    nn.ModuleDict({"reward": reward}).to(torch.bfloat16).train()
    assert torch.equal(reward(IMAGES, PROMPTS), expected)


def test_copies_travel_without_weights(reward):
    expected = reward(IMAGES, PROMPTS)
    for twin in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
        assert twin._loaded is None
        torch.testing.assert_close(twin(IMAGES, PROMPTS), expected, atol=1e-6, rtol=0)


def test_weights_follow_the_device(rewards):
    """Without a second device, a module's own record of the first must do; `meta` has no values but has a name."""
    reward = copy.deepcopy(rewards["clip_score"])
    nn.ModuleDict({"reward": reward}).to("meta")
    assert reward._device.type == "meta"
    assert reward.load().to(reward._device).model.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_scores_on_a_gpu(reward):
    expected = reward(IMAGES, PROMPTS)
    on_gpu = reward.to("cuda")
    scores = on_gpu(IMAGES.cuda(), PROMPTS)
    on_gpu.to("cpu")
    assert scores.device.type == "cpu"
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (IMAGES[0], PROMPTS, r"Images have shape \[3, 64, 64\]: expected \[B, 3, H, W\]"),
        (IMAGES[:, :1], PROMPTS, r"Images have shape \[4, 1, 64, 64\]"),
        (IMAGES.long(), PROMPTS, r"Images have type torch\.int64: expected a float type"),
        (IMAGES.float(), PROMPTS, r"Images span \[\d+, 2\d\d\]: expected floats in \[0, 1\], or uint8"),
        (IMAGES / 127.5 - 1, PROMPTS, r"Images span \[-0\.\d+, [\d.]+\]: expected floats"),
        (IMAGES, PROMPTS[:3], "got 4 images for 3 prompts: give one prompt an image"),
    ],
)
def test_input_is_checked(reward, images, prompts, message):
    with pytest.raises(ValueError, match=message):
        reward(images, prompts)


def test_no_images_give_no_scores(reward):
    assert reward(IMAGES[:0], []).shape == (0,)


def test_facts(rewards):
    assert list(dict.fromkeys(reward.name for reward in rewards.values())) == [n for n in NAMES if n != "ocr_lines"]
    assert all(reward.version or reward.name == "geneval" for reward in rewards.values())
    assert all(reward.licence or reward.name == "geneval" for reward in rewards.values())
    assert {n: r.needs for n, r in rewards.items() if r.needs} == {
        "ocr": ("ocr",),
        "ocr_lines": ("ocr",),
        "geneval": ("include",),
    }
    assert not any(reward.differentiable for reward in rewards.values())
    may_be = {type(r).__name__ for r in rewards.values() if "differentiable" in inspect.signature(type(r)).parameters}
    assert may_be == {"ClipScore", "HPSv2", "PickScore", "Aesthetic", "ImageReward"}


def test_missing_metadata_is_named(rewards):
    bare = [*PROMPTS[:3], Prompt("a bare prompt")]
    with pytest.raises(
        ValueError, match=r"""geneval needs "include" .*, and 'a bare prompt' has none: use a \.jsonl file"""
    ):
        rewards["geneval"](IMAGES, bare)
    rewards["clip_score"](IMAGES, bare)


class Scripted(RewardModel):
    name = "scripted"

    def __init__(self, result):
        super().__init__()
        self.result = result

    def score(self, images, prompts):
        return self.result(images)


def test_infinite_scores_become_nan_and_are_counted():
    reward = Scripted(lambda images: torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64))
    scores = reward(IMAGES, PROMPTS)
    assert scores[0] == 1
    assert scores[1:].isnan().all()
    assert reward.failed == 3


def test_a_bug_in_scoring_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        Scripted(lambda images: 1 / 0)(IMAGES, PROMPTS)


@pytest.mark.parametrize(
    "returned",
    [
        [0, 0.5, math.nan, True],
        np.array([0, 0.5, np.nan, 1]),
        torch.tensor([0, 0.5, torch.nan, 1], dtype=torch.float64),
        [torch.tensor(0), torch.tensor(0.5), torch.tensor(torch.nan), torch.tensor(1 + 1e-6)],
    ],
    ids=lambda r: type(r).__name__,
)
def test_numbers_of_any_kind_are_taken(returned):
    scores = Scripted(lambda images: returned)(IMAGES, PROMPTS)
    assert scores.dtype == torch.float32
    assert scores.nan_to_num(-1).tolist() == [0, 0.5, -1, 1]
    assert Scripted(lambda images: images[:, 0, 0, 0] > 2)(IMAGES, PROMPTS).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(4, 1), r"Scripted\.score returned shape \[4, 1\] .* for 4 images: expected \[4\]"),
        ([0.5] * 3, r"returned shape \[3\] and type torch.float32 for 4 images"),
        (0.5, r"returned shape \[\] "),
        (torch.zeros(4, dtype=torch.complex64), "type torch.complex64 for 4 images: .* real numbers"),
        ([0.5, None, 1, 1], r"returned \[0.5, None, 1, 1\]: expected a number for each of 4 images, and NaN for one"),
        (["a"] * 4, "expected a number for each of 4 images"),
        (None, "returned None: expected a number"),
        ([0, 1.5, 0.5, 2], r"Scripted.score returned 1.5, outside of scripted's score_range \[0, 1\]: give the range"),
        ([0, 1, math.nan, -0.01], r"returned -0.01, outside"),
    ],
)
def test_what_is_no_score_is_named(returned, message):
    with pytest.raises(UserError, match=message):
        Scripted(lambda images: returned)(IMAGES, PROMPTS)


def test_signboard_names_resolve_to_the_package():
    reward = PickScore("signboard:pickscore")
    assert Path(reward.resolve_model()).parts[-3:] == ("signboard", "weights", "pickscore")
    assert reward.resolve_processor() == reward.resolve_model()
    with pytest.raises(ValueError, match=r"'signboard:none' is not embedded: known are .*signboard:clip"):
        ClipScore("signboard:none").validate()


def test_importing_rewards_is_cheap():
    heavy = ["transformers", "rapidocr", "onnxruntime", "huggingface_hub", "lightning", "httpx"]
    code = f"import sys, recast_lightning.rewards; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_families_do_not_import_each_other():
    folder = Path(__file__).parents[2] / "recast_lightning/rewards"
    crossed = {
        f"{file.parent.name}/{file.name} -> {other}"
        for file in folder.glob("*/*.py")
        for other in re.findall(r"recast_lightning\.rewards\.(\w+)\.", file.read_text(encoding="utf-8"))
        if other != file.parent.name
    }
    assert crossed == {"geneval/colors.py -> clip"}  # colours are named on the CLIP model that other rewards use, too
