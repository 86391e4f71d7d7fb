import copy
import logging
import pickle

import pytest
import torch
from helpers import tiny_blip
from helpers.pictures import by_pillow, noise
from helpers.reward_checks import check_gradients, check_weights_follow_the_device
from safetensors.torch import save_file
from torch.nn import functional as F

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.blip.image_reward import ImageReward

TEXTS = ["a red cat", "two dogs on a sign", "a", "a red cat", "blue zebra"]
PROMPTS = [Prompt(text) for text in TEXTS]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with ImageReward.pt and the tokenizer, and the reference."""
    folder = tmp_path_factory.mktemp("image_reward")
    reference = tiny_blip.ReferenceImageReward()
    torch.save(reference.state_dict(), folder / "ImageReward.pt")
    tiny_blip.save_tokenizer(folder)
    return folder, reference


@pytest.fixture
def reward(published):
    return ImageReward(str(published[0]), tokenizer=str(published[0]))


@pytest.fixture(scope="module")
def images():
    return noise(5, tiny_blip.IMAGE, tiny_blip.IMAGE)


def normalised(images):
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    return (images - mean[:, None, None]) / std[:, None, None]


def test_agrees_with_an_independent_forward_pass(published, reward, images, tmp_path):
    folder, reference = published
    expected = reference.score(normalised(images), TEXTS)
    assert expected.std() > 0.01  # else the comparison says nothing
    torch.testing.assert_close(reward(images, PROMPTS), expected, atol=1e-5, rtol=0)
    save_file({key: value.clone() for key, value in reference.state_dict().items()}, tmp_path / "same.safetensors")
    for model in (folder / "ImageReward.pt", tmp_path / "same.safetensors"):
        scores = ImageReward(str(model), tokenizer=str(folder))(images, PROMPTS)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_prompt_and_image_both_count(reward, images):
    scores = reward(images[[0, 0, 1]], [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert (scores[0] - scores[1]).abs() > 1e-3
    assert (scores[0] - scores[2]).abs() > 1e-3
    assert torch.equal(reward(images[:1], [Prompt("A RED cat")]), reward(images[:1], [Prompt("a red cat")]))


def test_batches_bytes_and_copies_change_nothing(published, reward, images):
    scores = reward(images, PROMPTS)
    single = torch.cat([reward(images[i : i + 1], PROMPTS[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(single, scores, atol=1e-5, rtol=0)
    small = ImageReward(str(published[0]), tokenizer=str(published[0]), batch_size=2)
    torch.testing.assert_close(small(images, PROMPTS), scores, atol=1e-5, rtol=0)
    octets = (images * 255).round().to(torch.uint8)
    assert torch.equal(reward(octets, PROMPTS), scores)
    for twin in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
        assert twin._loaded is None
        torch.testing.assert_close(twin(images, PROMPTS), scores, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(61, 90), (90, 61), (35, 32), (32, 35)])
def test_other_shapes_are_scaled_and_cropped_as_published(published, reward, height, width):
    """The published transform: Pillow's bicubic scaling, and a crop whose odd remainder rounds to even."""
    coarse = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    image = (F.interpolate(coarse, (height, width), mode="bilinear")[0] * 255).round().byte()
    expected = published[1].score(normalised(by_pillow(image, 32)), TEXTS[:1])
    torch.testing.assert_close(reward(image[None], PROMPTS[:1]), expected, atol=1e-5, rtol=0)
    tensors = ImageReward(str(published[0]), tokenizer=str(published[0]), differentiable=True)
    torch.testing.assert_close(tensors(image[None], PROMPTS[:1]), expected, atol=0.03, rtol=0)
    squashed = published[1].score(normalised(F.interpolate(image[None] / 255, 32, mode="area")), TEXTS[:1])
    assert (squashed - expected).abs() > 0.06  # so 0.03 is little


def test_long_prompts_are_cut_and_named_once(published, reward, images, caplog):
    texts = [" ".join(["cat"] * 33), " ".join(["cat"] * 33 + ["dogs"]), " ".join(["cat"] * 32 + ["dogs"])]
    with caplog.at_level(logging.WARNING):
        scores = torch.cat([reward(images[:1], [Prompt(text)]) for text in texts])
        reward(images[:1], [Prompt("sign " * 50)])
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]
    torch.testing.assert_close(scores, published[1].score(normalised(images[[0, 0, 0]]), texts), atol=1e-5, rtol=0)
    messages = [r.getMessage() for r in caplog.records]
    assert messages == [f"ImageReward reads only the first 35 tokens of {texts[1]!r}, which has 36 (said once)"]


def test_gradients_reach_the_images_also_after_inference_mode(published, images):
    reward = ImageReward(str(published[0]), tokenizer=str(published[0]), differentiable=True)
    check_gradients(reward, images, PROMPTS)
    assert not any(p.requires_grad for p in reward.load()[0].parameters())


def test_half_precision_is_close_and_keeps_the_head(published, reward, images):
    half = ImageReward(str(published[0]), tokenizer=str(published[0]), dtype="bfloat16")
    scores = half(images, PROMPTS)
    torch.testing.assert_close(scores, reward(images, PROMPTS), atol=0.1, rtol=0)
    assert scores.dtype == torch.float32
    model = half.load()[0]
    assert {model.vision.dtype, model.text.dtype} == {torch.bfloat16}
    assert model.mlp.layers["0"].weight.dtype == torch.float32


def test_weights_follow_the_device_and_stay_out_of_the_module_tree(reward):
    check_weights_follow_the_device(reward, PROMPTS, lambda: list(reward.load()[0].parameters()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blip.visual_encoder.blocks.1.attn.proj.bias"), "it lacks vision.encoder.*projection.bias"),
        (
            lambda s: s.pop("blip.text_encoder.encoder.layer.0.crossattention.self.key.weight"),
            "it lacks text.*key.weight",
        ),
        (lambda s: s.pop("mlp.layers.6.weight"), "it lacks mlp.layers.6.weight"),
        (lambda s: s.update(surplus=torch.zeros(1)), "it has the surplus surplus"),
        (
            lambda s: s.update({"blip.visual_encoder.head.weight": torch.zeros(1)}),
            "it has the surplus vision.head.weight",
        ),
        (
            lambda s: s.update({"mlp.layers.7.weight": torch.zeros(2, 16)}),
            "it has other shapes for mlp.layers.7.weight",
        ),
        (lambda s: s.pop("blip.visual_encoder.pos_embed"), "it has no tensor 'blip.visual_encoder.pos_embed'"),
        (
            lambda s: s.update({"blip.visual_encoder.patch_embed.proj.weight": torch.zeros(3)}),
            "a tensor has too few dimensions",
        ),
    ],
)
def test_other_tensors_are_refused(published, tmp_path, change, message):
    state = dict(published[1].state_dict())
    change(state)
    torch.save(state, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match=rf"ImageReward\.pt .*{message}[^\n]*\.$"):
        ImageReward(str(tmp_path), tokenizer=str(published[0])).load()


def test_another_vocabulary_is_refused(published, tmp_path):
    tiny_blip.save_tokenizer(tmp_path, words=6)
    with pytest.raises(
        ValueError, match=r"knows 15 tokens, and .* with \[DEC\] and \[ENC\] has 13: name the tokenizer"
    ):
        ImageReward(str(published[0]), tokenizer=str(tmp_path)).load()


def test_missing_weights_are_found_before_loading(published, tmp_path):
    folder = str(published[0])
    with pytest.raises(ValueError, match=r"image_reward model path '\./none' does not exist"):
        ImageReward("./none", tokenizer=folder).validate()
    with pytest.raises(ValueError, match=r'model folder .* holds no file "ImageReward\.pt": give the path of the file'):
        ImageReward(str(tmp_path), tokenizer=folder).validate()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"notes\.txt is none of \.pt, \.pth, \.bin, \.safetensors"):
        ImageReward(str(tmp_path / "notes.txt"), tokenizer=folder).validate()
    with pytest.raises(ValueError, match=r"image_reward tokenizer path '\./none' does not exist"):
        ImageReward(folder, tokenizer="./none").validate()
    ImageReward().validate()  # may exist on the hub: no network here


def test_hub_errors_are_one_sentence(published, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True, raising=False)
    with pytest.raises(ValueError, match=r'image_reward found no file "ImageReward\.pt" in "nobody/nothing-here"'):
        ImageReward("nobody/nothing-here", tokenizer=str(published[0])).load()
    with pytest.raises(ValueError, match='image_reward found no tokenizer in "nobody/nothing-here"'):
        ImageReward(str(published[0]), tokenizer="nobody/nothing-here").load()
    with pytest.raises(ValueError, match=r'image_reward found no tokenizer in "/'):
        ImageReward(str(published[0]), tokenizer=str(tmp_path)).load()


def test_facts_and_options(published):
    reward = ImageReward()
    assert (reward.version, reward.licence, reward.differentiable) == ("ImageReward-v1.0", "Apache-2.0", False)
    with pytest.raises(ValueError, match=r"image_reward can score below 0 .* give it a positive_map"):
        reward.check_positive()
    ImageReward(positive_map="exp").check_positive()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ImageReward(batch_size=0)
    with pytest.raises(ValueError, match='dtype is "int8"'):
        ImageReward(dtype="int8")
