"""Rewards on the same CLIP hold one model between them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers import tiny_clip

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import ClipScore, HPSv2, PickScore
from recast_lightning.rewards.clip.backbone import shared_clip

PROMPTS = [Prompt(text) for text in ("a red cat", "two dogs maybe", "a sign ok", "a red cat", "x")]
DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    tiny_clip.save_transformers(folder, quick_gelu=True)
    return str(folder)


@pytest.fixture(scope="module")
def images():
    return torch.rand(5, 3, tiny_clip.IMAGE, tiny_clip.IMAGE, generator=torch.Generator().manual_seed(0))


def test_a_model_in_use_is_not_read_again(path, images, monkeypatch):
    from transformers import CLIPModel

    reads = []
    original = CLIPModel.from_pretrained
    monkeypatch.setattr(CLIPModel, "from_pretrained", lambda *a, **k: reads.append(a) or original(*a, **k))
    gc.collect()  # what earlier tests held
    score, same = ClipScore(path), PickScore(path, batch_size=2)
    expected = score(images, PROMPTS)
    padded = HPSv2(path)(images[..., :20], PROMPTS)  # fits images in its own way
    clip = shared_clip(path, batch_size=3)
    twins = [same, clip, copy.deepcopy(score), pickle.loads(pickle.dumps(score))]
    models = [twin.model if twin is clip else twin.load().model for twin in twins]
    assert all(model is score.load().model for model in models)
    assert (clip.batch_size, same.load().batch_size, score.load().batch_size) == (3, 2, 64)
    assert len(reads) == 1
    assert torch.equal(score(images, PROMPTS), expected)
    assert not torch.allclose(score(images[..., :20], PROMPTS), padded * score.load().logit_scale() / 100)

    assert ClipScore(path, dtype="bfloat16").load().model is not models[0]
    assert len(reads) == 2


def test_a_model_that_nobody_uses_is_freed(path):
    first, second = ClipScore(path), ClipScore(path)
    alive = weakref.ref(first.load().model)
    second.load()
    del first
    gc.collect()
    assert alive() is second.load().model
    del second
    gc.collect()
    assert alive() is None


def test_rewritten_weights_are_read_again(tmp_path, images):
    tiny_clip.save_transformers(tmp_path, quick_gelu=True)
    old = ClipScore(str(tmp_path))
    before = old(images, PROMPTS)
    tiny_clip.save_transformers(tmp_path, quick_gelu=True, seed=1)
    assert (ClipScore(str(tmp_path))(images, PROMPTS) - before).abs().min() > 1e-4
    assert torch.equal(old(images, PROMPTS), before)


@pytest.mark.parametrize("device", DEVICES)
def test_each_device_has_its_own_model(path, images, device):
    stays, moves, joins = (ClipScore(path) for _ in range(3))
    expected = stays(images, PROMPTS)
    moves.load()
    with torch.inference_mode():  # scoring often happens there
        clips = [reward.load().to(reward._device) for reward in (stays, moves.to(device), joins.to(device))]
    models = [clip.model for clip in clips]
    assert [model.device.type for model in models] == ["cpu", device, device]
    assert models[1] is models[2]
    tensors = [*models[1].parameters(), *models[1].buffers()]
    assert {tensor.device.type for tensor in tensors} == {device}
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)
    assert torch.equal(stays(images, PROMPTS), expected)
    if device == "cuda":
        torch.testing.assert_close(moves(images, PROMPTS), expected, atol=1e-3, rtol=0)
