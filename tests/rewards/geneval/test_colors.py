import pytest
import torch
from helpers import tiny_clip
from torch.nn import functional as F

from recast_lightning.prompts.geneval_names import COLORS
from recast_lightning.rewards.clip.clip_score import ClipScore
from recast_lightning.rewards.geneval.colors import ColorNamer


class Palette:
    """Stands in for CLIP: embeds an image as its mean colour, and a text by its colour's name."""

    image_size = 8
    rgb = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}

    def __init__(self):
        self.images, self.texts = [], []

    def to(self, device):
        return self

    def embed_images(self, images):
        self.images.append(images)
        return F.normalize(images.mean((2, 3)), dim=1)

    def embed_texts(self, texts):
        self.texts += texts
        return torch.stack([self._embed(text) for text in texts])

    def _embed(self, text):
        """Sure of itself for objects only: the mean of three templates must be taken of unit vectors."""
        color = text.removeprefix("a photo of a ").split()[0].removesuffix("-colored")
        return F.normalize(torch.tensor(self.rgb.get(color, (-1, -1, -1)), dtype=torch.float32), dim=0)


def test_objects_are_cut_out_on_grey():
    image = torch.zeros(3, 20, 30)
    image[1, 4:12, 10:18] = 1  # green
    image[0, 4:12, 18:26] = 1  # red beside it
    mask = torch.zeros(2, 20, 30, dtype=torch.bool)
    mask[0, 4:12, 10:18] = True
    mask[0, 4:8, 10:14] = False
    mask[1, 4:12, 18:26] = True
    clip = Palette()
    names = ColorNamer(clip).name(image, mask, [(10.0, 4.0, 18.0, 12.0), (18.0, 4.0, 26.0, 12.0)], ["cup", "dog"])
    assert names == ["green", "red"]
    first, second = clip.images[0]
    expected = torch.tensor([0.0, 1, 0])[:, None, None].expand(3, 8, 8).clone()
    expected[:, :4, :4] = 0.6
    torch.testing.assert_close(first, expected)
    assert (second[0] == 1).all()
    assert len(clip.texts) == 2 * 3 * len(COLORS) == 60
    assert clip.texts[:3] == ["a photo of a red cup", "a photo of a red-colored cup", "a photo of a red object"]
    assert "a photo of a white-colored dog" in clip.texts


@pytest.mark.parametrize(("side", "start"), [(9, 0), (10, 1), (11, 2), (12, 2), (13, 2), (15, 4)])
def test_the_middle_is_rounded_as_in_geneval(side, start):
    """By torchvision's CenterCrop, and not one pixel before it, where transformers' CLIP looks."""
    ramp = (torch.arange(side) * 16 / 255).expand(3, 8, side)  # of 8 bits, as pictures are
    for image in (ramp, ramp.mT):
        clip, (height, width) = Palette(), image.shape[1:]
        ColorNamer(clip).name(image, torch.ones(1, height, width) > 0, [(0.0, 0.0, width, height)], ["cup"])
        middle = image.narrow(1 if height > width else 2, start, 8)
        assert torch.equal(clip.images[0][0], middle)


def test_a_thin_object_has_its_middle_looked_at():
    image = torch.zeros(3, 4, 3000)
    image[2] = 1
    image[:, :, :1000] = image[:, :, 2000:] = torch.tensor([1.0, 0, 0])[:, None, None]
    mask = torch.zeros(1, 4, 3000, dtype=torch.bool)
    mask[:, 1:3] = True
    clip = Palette()
    assert ColorNamer(clip).name(image, mask, [(0.0, 1.0, 3000.0, 3.0)], ["tie"]) == ["blue"]
    assert clip.images[0].shape == (1, 3, 8, 8)


def test_colours_by_a_true_clip(tmp_path):
    """Zero-shot as in CLIP's own logits: texts averaged per colour."""
    tiny_clip.save_transformers(tmp_path, quick_gelu=True)
    clip = ClipScore(str(tmp_path)).load()
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    whole = torch.ones(1, 32, 32, dtype=torch.bool)
    namer = ColorNamer.load(str(tmp_path), None, "float32", torch.device("cpu"))
    assert namer.clip.model is clip.model  # one CLIP in memory
    best, name = -2.0, None
    for color in COLORS:
        texts = [f"a photo of a {color} cup", f"a photo of a {color}-colored cup", f"a photo of a {color} object"]
        text = torch.stack([clip.embed_texts([text])[0] for text in texts]).mean(0)
        cosine = F.cosine_similarity(clip.embed_images(image[None]), text[None]).item()
        if cosine > best:
            best, name = cosine, color
    assert namer.name(image, whole, [(0.0, 0.0, 32.0, 32.0)], ["cup"]) == [name]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_clip_names_nothing(value):
    clip = Palette()
    clip.embed_images = lambda images: torch.full((len(images), 3), value)
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    assert ColorNamer(clip).name(torch.rand(3, 8, 8), mask, [(0.0, 0.0, 8.0, 8.0)], ["cup"]) is None
