import itertools

import pytest
import torch
from helpers.pictures import sign
from torch.nn import functional as F

from recast_lightning.rewards import GenEval, SignboardDetector
from recast_lightning.rewards.geneval.mask2former import Mask2FormerDetector
from recast_lightning.signboard.world import COLORS, SHAPES, draw_tensor, make_prompts, parse


def find(*pictures, **options):
    return SignboardDetector(**options).detect(torch.stack(pictures).float() / 255)


def certain(detections, threshold=0.75):
    return sorted((d.label, d.color) for d in detections if d.score > threshold)


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("diameter", [13, 16, 20])
def test_every_shape_in_every_colour(diameter, side):
    kinds = list(itertools.product(SHAPES, COLORS))
    found = find(*[sign([(*kind, 21.3, 17.6, diameter)], "AE", side=side) for kind in kinds])
    assert [certain(f) for f in found] == [[kind] for kind in kinds]
    for (one,) in found:
        x0, y0, x1, y1 = (v * 64 / side for v in one.box)
        assert abs((x0 + x1) / 2 - 21.3) < 1.2
        assert abs((y0 + y1) / 2 - 17.6) < 2
        assert abs((x1 - x0) - diameter) < 3.5


def test_several_shapes_and_tinted_backgrounds():
    row = [("circle", "red", 10, 15, 15), ("star", "purple", 31, 16, 17), ("triangle", "orange", 53, 14, 15)]
    for background in [(255, 255, 255), (216, 250, 235), (250, 216, 240), (230, 230, 255)]:
        (found,) = find(sign(row, "NOT", background=background))
        assert certain(found) == sorted((shape, color) for shape, color, *_ in row)
    (close,) = find(sign([("square", "blue", 20, 15, 16), ("square", "blue", 38.5, 15, 16)]))  # a gap of 2.5 pixels
    assert certain(close) == [("square", "blue")] * 2


def test_text_and_empty_signs_hold_no_shapes():
    found = find(
        sign([]), sign([], "KOALA"), sign([], "ACE", text_y=16), torch.full((3, 64, 64), 255, dtype=torch.uint8)
    )
    assert found == [[], [], [], []]


def test_noise_and_garbage():
    generator = torch.Generator().manual_seed(0)
    garbage = torch.rand(20, 3, 64, 64, generator=generator)
    smooth = F.interpolate(torch.rand(20, 3, 6, 6, generator=generator), 64, mode="bicubic").clamp(0, 1)
    detector = SignboardDetector()
    assert [certain(f) for f in detector.detect(garbage)] == [[]] * 20
    assert sum(len(certain(f)) for f in detector.detect(smooth)) <= 8  # 89 where regions need not stand alone


def test_a_shaded_shape_is_one_shape():
    """An autoencoder's orange runs into yellow and red; the shape has the colour of most of it."""
    orange, yellow = (sign([("star", color, 32, 32, 20)]) for color in ("orange", "yellow"))
    shaded = torch.where(torch.arange(64) < 29, yellow, orange)
    assert [certain(f) for f in find(shaded)] == [[("star", "orange")]]


def test_oblong_and_broken_shapes_are_not_certain():
    wide = F.interpolate(sign([("circle", "red", 32, 32, 18)])[None].float(), (64, 128), mode="bilinear")[
        0, :, :, 32:96
    ]
    half = sign([("circle", "red", 32, 32, 22)])
    half[:, 32:] = half[:, :1, :1]
    pair = sign([("square", "red", 24, 32, 16), ("square", "red", 40, 32, 16)])  # grown together
    assert [certain(f) for f in find(wide.clamp(0, 255).byte(), half, pair)] == [[], [], []]


@pytest.mark.parametrize(("noise", "blur", "least"), [(0.0, 0.0, 1.0), (0.03, 0.7, 0.99), (0.06, 0.5, 0.97)])
def test_signs_of_the_world(noise, blur, least):
    prompts = make_prompts(120, seed=0, split="train")
    images = torch.stack([draw_tensor(parse(prompt), i) for i, prompt in enumerate(prompts)]).float() / 255
    if blur:
        taps = torch.exp(-(torch.arange(-2, 3).float() ** 2) / (2 * blur**2))
        kernel = (taps[:, None] * taps / taps.sum() ** 2).expand(3, 1, 5, 5)
        images = F.conv2d(F.pad(images, (2, 2, 2, 2), mode="replicate"), kernel, groups=3)
    images = (images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    detector = SignboardDetector()
    assert GenEval(detector, mode="strict")(images, prompts).mean() >= least
    # The score tells a sign from another sign.
    assert GenEval(detector, mode="strict")(images.roll(1, 0), prompts).mean() < 0.1


@pytest.mark.parametrize(("options", "name"), [({"threshold": 1.5}, "threshold"), ({"min_area": -1}, "min_area")])
def test_bad_options(options, name):
    with pytest.raises(ValueError, match=f"{name} is .*expected a fraction"):
        SignboardDetector(**options)


def test_geneval_says_whose_weights_it_uses():
    ours, theirs = GenEval(SignboardDetector()), GenEval(Mask2FormerDetector("a/swin", clip="b/clip"))
    assert (ours.version, ours.licence) == ("", "")
    assert theirs.version == "swin, clip"
    assert "CC-BY-NC-4.0" in theirs.licence
