import logging

import pytest
import torch
from helpers import tiny_clip
from helpers.pictures import noise
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import ClipScore, HPSv2, PickScore

TEXTS = ["a red cat", "two dogs maybe", "a sign ok", "a red cat", "x"]
PROMPTS = [Prompt(text) for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clip")


@pytest.fixture(scope="module")
def openai(folder):
    """An OpenAI-like folder (quick GELU) and its reference."""
    return folder / "openai", tiny_clip.save_transformers(folder / "openai", quick_gelu=True)


@pytest.fixture(scope="module")
def laion(folder):
    """A LAION-like folder (GELU) without tokenizer, a processor folder beside it, and the reference."""
    reference = tiny_clip.save_transformers(folder / "laion", quick_gelu=False, processor=False, seed=1)
    (folder / "processor").mkdir()
    tiny_clip.save_processor(folder / "processor")
    return folder / "laion", folder / "processor", reference


@pytest.fixture(scope="module")
def images():
    return noise(5, tiny_clip.IMAGE, tiny_clip.IMAGE)


def normalised(images):
    mean, std = torch.tensor(tiny_clip.MEAN), torch.tensor(tiny_clip.STD)
    return (images - mean[:, None, None]) / std[:, None, None]


def test_clip_score_is_the_scaled_cosine(openai, images):
    path, reference = openai
    expected = reference.cosine(normalised(images), TEXTS) * reference.logit_scale.exp() / 100
    torch.testing.assert_close(ClipScore(str(path))(images, PROMPTS), expected.detach(), atol=1e-5, rtol=0)
    assert expected.std() > 0.01  # else the comparison says nothing


def test_pickscore_is_divided_by_26(laion, images):
    path, processor, reference = laion
    expected = reference.cosine(normalised(images), TEXTS) * reference.logit_scale.exp() / 26
    scores = PickScore(str(path), processor=str(processor))(images, PROMPTS)
    torch.testing.assert_close(scores, expected.detach(), atol=1e-5, rtol=0)


def test_hpsv2_is_the_cosine_whatever_the_layout(laion, images, tmp_path):
    path, processor, reference = laion
    expected = reference.cosine(normalised(images), TEXTS)
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, tmp_path / "wrapped.pt")
    torch.save(state, tmp_path / "plain.pt")
    save_file(state, tmp_path / "plain.safetensors")
    for model in (path, *tmp_path.iterdir()):
        scores = HPSv2(str(model), processor=str(processor))(images, PROMPTS)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_the_activation_matters(openai, laion, images):
    """The agreement above could not see a wrong activation if it made no difference."""
    quick = tiny_clip.ReferenceCLIP(quick_gelu=True).cosine(normalised(images), TEXTS)
    plain = tiny_clip.ReferenceCLIP(quick_gelu=False).cosine(normalised(images), TEXTS)
    assert (quick - plain).abs().max() > 1e-3


def test_open_clip_files_load_strictly(laion, tmp_path):
    _, processor, reference = laion
    state = dict(reference.state_dict())
    for name, change, message in [
        (
            "missing",
            lambda s: s.pop("visual.ln_pre.bias"),
            "does not fit a CLIP model of its own sizes: .*pre_layrnorm.bias",
        ),
        ("extra", lambda s: s.update(surplus=torch.zeros(1)), "does not fit .*surplus"),
        (
            "foreign",
            lambda s: s.pop("visual.conv1.weight"),
            "is no open_clip ViT checkpoint: it has no tensor 'visual.conv1",
        ),
    ]:
        broken = dict(state)
        change(broken)
        torch.save(broken, tmp_path / f"{name}.pt")
        with pytest.raises(ValueError, match=f"(?s){name}.pt {message}"):
            HPSv2(str(tmp_path / f"{name}.pt"), processor=str(processor)).load()


def test_transformers_folders_load_strictly(tmp_path):
    tiny_clip.save_transformers(tmp_path, quick_gelu=True)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    expected = ClipScore(str(tmp_path))(torch.zeros(1, 3, 32, 32), PROMPTS[:1])
    ranges = {f"{tower}_model.embeddings.position_ids": torch.arange(9)[None] for tower in ("text", "vision")}
    save_file({**state, **ranges}, file, {"format": "pt"})  # as older checkpoints have them
    scores = ClipScore(str(tmp_path))(torch.zeros(1, 3, 32, 32), PROMPTS[:1])
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)
    for change, message in [
        (lambda s: s.pop("vision_model.pre_layrnorm.bias"), "it lacks vision_model.pre_layrnorm.bias"),
        (lambda s: s.update(surplus=torch.zeros(1)), "it has the surplus surplus"),
        (lambda s: s.update(logit_scale=torch.zeros(2)), "it has other shapes for logit_scale"),
    ]:
        broken = dict(state)
        change(broken)
        save_file(broken, file, {"format": "pt"})
        with pytest.raises(
            ValueError, match=rf"does not fit the CLIP model that its config.json describes: {message}\.$"
        ):
            ClipScore(str(tmp_path)).load()


def test_versions_and_licences():
    said = {kind.name: (kind.version, kind.licence) for kind in (ClipScore, HPSv2, PickScore)}
    assert said == {
        "clip_score": ("openai/clip-vit-large-patch14", "not verified (code: MIT)"),
        "hpsv2": ("HPS_v2.1", "not verified (code: Apache-2.0)"),
        "pickscore": ("PickScore_v1", "not verified (code: MIT)"),
    }


def test_head_counts_of_vit_h():
    """ViT-H-14 has 16 heads in both towers: 80 wide for vision, 64 wide for text."""
    from recast_lightning.rewards.clip.hpsv2 import _heads

    assert _heads(1024) == 16
    assert _heads(1280) == 16


def test_half_precision_is_close(openai, images):
    path, _ = openai
    full = ClipScore(str(path))(images, PROMPTS)
    for dtype in ("bfloat16", "float16"):
        reward = ClipScore(str(path), dtype=dtype)
        half = reward(images, PROMPTS)
        assert half.dtype == torch.float32
        assert reward.load().model.dtype == getattr(torch, dtype)
        torch.testing.assert_close(half, full, atol=0.02, rtol=0)
        assert (half != full).any()


def test_batch_size_does_not_matter(openai, images):
    path, _ = openai
    scores = [ClipScore(str(path), batch_size=n)(images, PROMPTS) for n in (1, 2, 64)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-6, rtol=0)


def test_gradients_reach_the_images_also_after_inference_mode(openai, images):
    path, _ = openai
    reward = ClipScore(str(path), differentiable=True)
    with torch.inference_mode():  # loads, and remembers text embeddings
        reward(images, PROMPTS)
    leaf = F.interpolate(images, 50).requires_grad_()  # goes through resizing and cropping
    reward.score(leaf, PROMPTS).sum().backward()
    assert leaf.grad.flatten(1).abs().sum(1).min() > 0
    assert not any(p.requires_grad for p in reward.load().model.parameters())

    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).double()
    step = 1e-3
    exact = images.clone().requires_grad_()
    reward.score(exact, PROMPTS).sum().backward()
    slope = (exact.grad * direction).sum()
    up, down = (reward.score((images + s * step * direction).float(), PROMPTS).sum() for s in (1, -1))
    assert slope.item() == pytest.approx(((up - down) / (2 * step)).item(), rel=0.05, abs=1e-3)


def test_long_prompts_keep_their_end_token(openai, images, caplog):
    path, _ = openai
    reward = ClipScore(str(path))
    room = tiny_clip.CONTEXT - 2
    texts = ["a" * room, "a" * room + "b", "b" + "a" * room, "a" * (room - 1) + "b"]
    with caplog.at_level(logging.WARNING):
        scores = [reward(images[:1], [Prompt(text)]).item() for text in texts]
        reward(images[:1], [Prompt("c" * 100)])
    assert scores[2] != scores[1]
    assert len(set(scores)) >= 3
    warnings = [r.getMessage() for r in caplog.records if "CLIP reads only" in r.getMessage()]
    assert len(warnings) == 1
    assert f"first {tiny_clip.CONTEXT} tokens of '{texts[1]}', which has {tiny_clip.CONTEXT + 1}" in warnings[0]


def test_the_memo_of_texts_is_bounded(openai, images, monkeypatch):
    monkeypatch.setattr("recast_lightning.rewards.clip.backbone._MEMO_SIZE", 3)
    path, _ = openai
    reward = ClipScore(str(path))
    first = reward(images, PROMPTS)  # four distinct texts
    clip = reward.load()
    assert len(clip._memo) == 3
    calls = []
    original = clip._embed_text_chunk
    monkeypatch.setattr(clip, "_embed_text_chunk", lambda texts: calls.append(texts) or original(texts))
    torch.testing.assert_close(reward(images, PROMPTS), first, atol=1e-6, rtol=0)
    assert calls == [["a red cat"]]  # the eldest had to go


def test_scores_are_of_8_bit_pictures(openai, images):
    path, _ = openai
    nearly = images + 0.001  # of 1/255 = 0.004
    for kind in (ClipScore, HPSv2, PickScore):
        exact = kind(str(path))
        assert torch.equal(exact(nearly, PROMPTS), exact(images, PROMPTS))
        tensors = kind(str(path), differentiable=True)
        assert not torch.equal(tensors(nearly, PROMPTS), tensors(images, PROMPTS))
        torch.testing.assert_close(tensors(images, PROMPTS), exact(images, PROMPTS), atol=1e-6, rtol=0)
        with pytest.raises(ValueError, match="No gradients pass 8-bit pictures, .* set differentiable: true"):
            exact.score(images.clone().requires_grad_(), PROMPTS)


def test_signboards_judges_read_floats_as_when_they_were_trained(images):
    images = F.interpolate(images, 64)
    for reward in (ClipScore("signboard:clip"), HPSv2("signboard:hpsv2"), PickScore("signboard:pickscore")):
        assert reward.differentiable
        assert not torch.equal(reward(images + 0.001, PROMPTS), reward(images, PROMPTS))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a “sign” that’s ok", 'a "sign" that\'s ok'),
        ("salt &amp;amp; pepper", "salt & pepper"),
        ("<b>salt &amp;amp; pepper", "<b>salt & pepper"),  # ftfy leaves HTML alone where there is a tag
        ("Ｆｕｌｌ ｗｉｄｔｈ, ﬁne", "full width, fine"),
        ("donâ€™t", "don't"),
        (" ΟΔΟΣ ", "οδος"),
        ("a cat, 2 dogs", "a cat, 2 dogs"),
    ],
)
def test_hpsv2_mends_text_before_it_is_read(text, read):
    """Expected values by open_clip's tokenizer (hpsv2 1.2.0), which the other two rewards were not trained with."""
    assert HPSv2().clean(text) == read
    assert {ClipScore().clean(text), PickScore().clean(text)} == {text}


def test_hpsv2_scores_mended_text(laion, images):
    reward = HPSv2(str(laion[0]), processor=str(laion[1]))
    mended = reward(images, [Prompt('a "cat"')] * 5)
    assert torch.equal(reward(images, [Prompt("a “cat”")] * 5), mended)


def test_where_the_processor_comes_from(openai, laion):
    with_tokenizer, without = str(openai[0]), str(laion[0])
    laion_hub = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    assert PickScore(with_tokenizer).resolve_processor() == with_tokenizer
    assert PickScore(without).resolve_processor() == laion_hub
    assert PickScore().resolve_processor() == laion_hub
    assert HPSv2().resolve_processor() == laion_hub
    assert ClipScore().resolve_processor() == "openai/clip-vit-large-patch14"
    with pytest.raises(ValueError, match="has no tokenizer: name the folder that does as `processor`"):
        ClipScore(without).validate()


@pytest.mark.parametrize("kind", [ClipScore, HPSv2, PickScore])
def test_missing_weights_are_found_before_loading(kind, tmp_path):
    for path in ("./none", "/no/such/clip", "no-slash", "a/b/c", str(tmp_path / "gone")):
        with pytest.raises(ValueError, match=f"{kind.name} model path '{path}' does not exist: give a local path"):
            kind(path).validate()
    with pytest.raises(ValueError, match=r"is no CLIP model: expected a folder .* config\.json"):
        kind(str(tmp_path)).validate()
    with pytest.raises(ValueError, match=f"{kind.name} processor path '[.]/none' does not exist"):
        kind("owner/name", processor="./none").validate()
    kind("owner/name").validate()  # may exist on the hub: no network here


def test_hub_errors_are_one_sentence(monkeypatch, laion):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True, raising=False)
    processor = str(laion[1])
    with pytest.raises(
        ValueError, match='found no model of the type "clip" in "nobody/nothing-here", neither here nor on the hub'
    ):
        ClipScore("nobody/nothing-here", processor=processor).load()
    with pytest.raises(ValueError, match=r'found no file "HPS_v2.1_compressed\.pt" in "nobody/nothing-here"'):
        HPSv2("nobody/nothing-here", processor=processor).load()
    with pytest.raises(ValueError, match='clip_score found no tokenizer in "nobody/nothing-here"'):
        ClipScore(str(laion[0]), processor="nobody/nothing-here").load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"dtype": "int8"}, 'dtype is "int8": expected one of float32'),
        ({"differentiable": "no"}, "differentiable is 'no': expected True or False"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ClipScore(**options)
