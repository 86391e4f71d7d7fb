import copy
import logging
import pickle

import pytest
import torch
from helpers import tiny_clip
from helpers.pictures import by_pillow, noise
from helpers.reward_checks import check_gradients, check_weights_follow_the_device
from helpers.tiny_blip import published_head
from safetensors.torch import save_file
from torch.nn import functional as F

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import ClipScore
from recast_lightning.rewards.clip.aesthetic import Aesthetic

PROMPTS = [Prompt("a red cat")] * 5
FILE = "aesthetic-model.pth"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with CLIP, a folder with the head, and the references of both."""
    folder = tmp_path_factory.mktemp("aesthetic")
    clip = tiny_clip.save_transformers(folder / "clip", quick_gelu=True)
    head = published_head(tiny_clip.EMBED)
    (folder / "head").mkdir()
    torch.save(state(head), folder / "head" / FILE)
    return folder / "clip", folder / "head", clip, head


def state(head):
    return {f"layers.{key}": value.clone() for key, value in head.state_dict().items()}


@pytest.fixture
def reward(published):
    return Aesthetic(str(published[0]), str(published[1]))


@pytest.fixture(scope="module")
def images():
    return noise(5, tiny_clip.IMAGE, tiny_clip.IMAGE)


@torch.no_grad()
def by_hand(published, images):
    mean, std = torch.tensor(tiny_clip.MEAN), torch.tensor(tiny_clip.STD)
    embedding = published[2].visual((images - mean[:, None, None]) / std[:, None, None])
    return published[3](embedding / embedding.norm(dim=1, keepdim=True))[:, 0]


def test_agrees_with_an_independent_forward_pass(published, reward, images, tmp_path):
    expected = by_hand(published, images)
    assert expected.std() > 0.01  # else the comparison says nothing
    torch.testing.assert_close(reward(images, PROMPTS), expected, atol=1e-5, rtol=0)
    torch.save({"state_dict": state(published[3])}, tmp_path / "wrapped.pt")
    save_file(state(published[3]), tmp_path / "plain.safetensors")
    for file in (published[1] / FILE, *tmp_path.iterdir()):
        scores = Aesthetic(str(published[0]), str(file))(images, PROMPTS)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_the_length_of_the_embedding_does_not_count_and_the_prompt_neither(published, reward, images):
    scores = reward(images, PROMPTS)
    assert torch.equal(reward(images, [Prompt(f"number {i}") for i in range(5)]), scores)
    clip, _ = reward.load()
    clip.model = copy.deepcopy(clip.model)  # the first may be shared
    clip.model.visual_projection.weight.mul_(3)
    torch.testing.assert_close(reward(images, PROMPTS), scores, atol=1e-5, rtol=0)


def test_batches_bytes_and_copies_change_nothing(published, reward, images):
    scores = reward(images, PROMPTS)
    single = torch.cat([reward(images[i : i + 1], PROMPTS[:1]) for i in range(5)])
    torch.testing.assert_close(single, scores, atol=1e-5, rtol=0)
    small = Aesthetic(str(published[0]), str(published[1]), batch_size=2)
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
    expected = by_hand(published, by_pillow(image, 32))
    torch.testing.assert_close(reward(image[None], PROMPTS[:1]), expected, atol=1e-5, rtol=0)
    tensors = Aesthetic(str(published[0]), str(published[1]), differentiable=True)(image[None], PROMPTS[:1])
    assert not torch.equal(tensors, expected)
    torch.testing.assert_close(tensors, expected, atol=5e-3, rtol=0)


def test_gradients_reach_the_images_also_after_inference_mode(published, images):
    reward = Aesthetic(str(published[0]), str(published[1]), differentiable=True)
    check_gradients(reward, images, PROMPTS)
    clip, head = reward.load()
    assert not any(p.requires_grad for p in (*clip.model.parameters(), *head.parameters()))


def test_half_precision_is_close_and_keeps_the_head(published, reward, images):
    half = Aesthetic(str(published[0]), str(published[1]), dtype="bfloat16")
    torch.testing.assert_close(half(images, PROMPTS), reward(images, PROMPTS), atol=0.05, rtol=0)
    clip, head = half.load()
    assert clip.model.dtype == torch.bfloat16
    assert head.layers["0"].weight.dtype == torch.float32


def test_clip_score_and_aesthetic_hold_one_model(published, reward, images):
    score = ClipScore(str(published[0]), batch_size=3)
    expected = score(images, PROMPTS)
    reward(images, PROMPTS)
    assert reward.load()[0].model is score.load().model
    assert torch.equal(score(images, PROMPTS), expected)


def test_weights_follow_the_device_and_stay_out_of_the_module_tree(reward):
    def parameters():
        clip, head = reward.load()
        return [*clip.model.parameters(), *head.parameters()]

    check_weights_follow_the_device(reward, PROMPTS, parameters)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("layers.6.bias"), "does not fit the aesthetic head: it lacks layers.6.bias"),
        (lambda s: s.pop("layers.0.weight"), "does not fit the aesthetic head: it "),
        (lambda s: s.update(surplus=torch.zeros(1)), "does not fit the aesthetic head: it has the surplus surplus"),
        (lambda s: s.update({"layers.7.weight": torch.zeros(2, 16)}), "it has other shapes for layers.7.weight"),
        (lambda s: s.update({"layers.0.weight": torch.zeros(3)}), "layers.0.weight has 1 dimensions"),
        (lambda s: s.update({"layers.0.weight": torch.zeros(1024, 7)}), "embeddings of 7 numbers, and .* gives 24"),
        (lambda s: s.update(note="text"), "holds no state dict: expected names and tensors only"),
        (lambda s: s.update(code=pytest), "holds a logging.error and is not read, since such things can run code"),
    ],
)
def test_other_tensors_are_refused(published, tmp_path, change, message):
    tensors = state(published[3])
    change(tensors)
    if "code" in tensors:  # a pickle that would run something
        tensors["code"] = Runs()
    torch.save(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=rf"{FILE} [^\n]*{message}[^\n]*\.$"):
        Aesthetic(str(published[0]), str(tmp_path)).load()


class Runs:
    def __reduce__(self):
        return logging.error, ("ran",)


def test_missing_weights_are_found_before_loading(published, tmp_path, monkeypatch):
    clip, head = str(published[0]), str(published[1])
    with pytest.raises(ValueError, match=r"aesthetic model path '\./none' does not exist"):
        Aesthetic("./none", head).validate()
    with pytest.raises(ValueError, match=r"aesthetic head path '\./none' does not exist"):
        Aesthetic(clip, "./none").validate()
    with pytest.raises(ValueError, match=rf'aesthetic head folder .* holds no file "{FILE}": give the path'):
        Aesthetic(clip, str(tmp_path)).validate()
    Aesthetic().validate()  # may exist on the hub: no network here
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True, raising=False)
    with pytest.raises(ValueError, match=rf'aesthetic found no file "{FILE}" in "nobody/nothing-here"'):
        Aesthetic(clip, "nobody/nothing-here").load()


def test_facts():
    reward = Aesthetic()
    assert (reward.version, reward.differentiable) == ("sac+logos+ava1-l14-linearMSE", False)
    assert "Apache-2.0" in reward.licence
    reward.check_positive()  # floored at 0
    assert reward.positive(torch.tensor([-1.0, 5.0])).tolist() == [0, 5]
    with pytest.raises(ValueError, match=r"aesthetic can score below 0"):
        Aesthetic(positive_map=None).check_positive()
