import logging
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import tiny_mask2former
from torch.nn import functional as F

from recast_lightning.prompts.geneval_names import COCO_CLASSES, COLORS
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.geneval.detection import Detection, Failure, Hint
from recast_lightning.rewards.geneval.geneval import GenEval
from recast_lightning.rewards.geneval.mask2former import Mask2FormerDetector, find_instances, preprocess

SMALL = tiny_mask2former.SMALL
ALL = frozenset(COCO_CLASSES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_mask2former.save_all(tmp_path_factory.mktemp("mask2former"))


def images(number=2, height=80, width=120, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(number, 3, height, width, generator=generator)


# --- scaling and reading the answer


def slow_bilinear(plane, height, width):
    """A plane at another size: each pixel's centre looks at the four centres around it."""
    rows, columns = plane.shape
    out = np.empty((height, width))
    for y in range(height):
        for x in range(width):
            v = min(max((y + 0.5) * rows / height - 0.5, 0), rows - 1)
            u = min(max((x + 0.5) * columns / width - 0.5, 0), columns - 1)
            top, left = int(v), int(u)
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            upper = plane[top, left] * (1 - u + left) + plane[top, right] * (u - left)
            lower = plane[bottom, left] * (1 - u + left) + plane[bottom, right] * (u - left)
            out[y, x] = upper * (1 - v + top) + lower * (v - top)
    return out


@pytest.mark.parametrize(
    ("size", "inner", "padded"),
    [
        ((40, 40), (64, 64), (64, 64)),
        ((40, 60), (64, 96), (64, 96)),
        ((60, 41), (94, 64), (96, 64)),
        ((30, 70), (43, 100), (64, 128)),
    ],
)
@pytest.mark.parametrize("openmmlab", [True, False])
def test_images_are_scaled_and_padded_as_in_training(size, inner, padded, openmmlab):
    picture = images(1, *size)
    pixels, within = preprocess(picture, 64, 100, openmmlab)
    assert within == inner
    assert pixels.shape == (1, 3, *padded)
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    for c in range(3):
        expected = (slow_bilinear(picture[0, c].numpy() * 255.0, *inner) - mean[c]) / std[c]
        np.testing.assert_allclose(pixels[0, c, : inner[0], : inner[1]], expected, atol=1e-4)
        border = (128 - mean[c]) / std[c] if openmmlab else 0
        np.testing.assert_allclose(pixels[0, c, inner[0] :, :], border, atol=1e-6)
        np.testing.assert_allclose(pixels[0, c, :, inner[1] :], border, atol=1e-6)


def slow_instances(class_logits, mask_logits, padded, inner, size, threshold):
    """(label, score, box, mask) of all objects, one pair of query and class after the other."""
    pairs = []
    for query, row in enumerate(class_logits.double().tolist()):
        whole = sum(math.exp(value) for value in row)
        pairs += [(math.exp(value) / whole, query, label) for label, value in enumerate(row[:-1])]
    found = []
    for probability, query, label in sorted(pairs, reverse=True)[:100]:
        plane = slow_bilinear(mask_logits[query].double().numpy(), *padded)[: inner[0], : inner[1]]
        plane = slow_bilinear(plane, *size)
        mask = plane > 0
        if not mask.any():
            continue
        score = probability * np.mean([1 / (1 + math.exp(-v)) for v in plane[mask]])
        ys, xs = mask.nonzero()
        if score > threshold:
            found.append((label, score, (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1), mask))
    return sorted(found, key=lambda one: -one[1])


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("size", [(20, 13), (11, 30)])
def test_objects_agree_with_a_slow_reading(size, threshold):
    generator = torch.Generator().manual_seed(1)
    class_logits = 3 * torch.randn(5, 31, generator=generator)
    mask_logits = 2 * torch.randn(5, 4, 6, generator=generator) - 1
    mask_logits[3] = -1  # marks nothing
    case = ((16, 24), (16, 20) if size[1] > size[0] else (13, 24), size, threshold)
    objects = find_instances(class_logits, mask_logits, *case)
    expected = slow_instances(class_logits, mask_logits, *case)
    assert objects.labels == [label for label, *_ in expected]
    assert objects.scores == pytest.approx([score for _, score, *_ in expected], abs=1e-5)
    assert objects.boxes == [box for *_, box, _ in expected]
    assert all(np.array_equal(ours, mask) for ours, (*_, mask) in zip(objects.masks.numpy(), expected, strict=True))
    assert expected


def test_at_most_a_hundred_objects():
    objects = find_instances(torch.zeros(10, 81), torch.ones(10, 4, 4), (16, 16), (16, 16), (16, 16), 0.0)
    assert len(objects.labels) == 100


class Eye:
    """Stands in for the network: query 0 is a cup wherever the picture is red, query 1 a dog wherever it is blue."""

    def __init__(self, change=lambda classes, masks: (classes, masks)):
        self.change = change

    def to(self, device):
        return self

    def __call__(self, pixel_values):
        classes = torch.zeros(len(pixel_values), 2, 81)
        classes[:, 0, COCO_CLASSES.index("cup")] = classes[:, 1, COCO_CLASSES.index("dog")] = 12
        quarter = F.avg_pool2d(pixel_values, 4)
        masks = torch.stack([quarter[:, 0] - quarter[:, 2], quarter[:, 2] - quarter[:, 0]], 1) * 10 - 8
        classes, masks = self.change(classes, masks)
        return SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks)


class Dull:
    """Stands in for the colours: what it was asked is what it answers."""

    def __init__(self):
        self.asked, self.clip = [], torch.nn.Identity()

    def name(self, image, masks, boxes, labels):
        self.asked += [*zip(labels, boxes, strict=True)]
        return ["green"] * len(labels)


def seeing(change=lambda classes, masks: (classes, masks), **options):
    found = Mask2FormerDetector("a/b", **(SMALL | options))
    found._loaded = Eye(change), Dull()
    return found


def picture(height, width, red=None, blue=None):
    image = torch.full((3, height, width), 0.4)
    for box, channels in ((red, (1, 0, 0)), (blue, (0, 0, 1))):
        if box:
            x0, y0, x1, y1 = box
            image[:, y0:y1, x0:x1] = torch.tensor(channels)[:, None, None]
    return image


@pytest.mark.parametrize(("height", "width"), [(60, 200), (200, 60), (96, 160), (64, 64), (300, 217)])
def test_boxes_are_in_pixels_of_the_image(height, width):
    red = (width // 8, height // 4, width // 2, height // 2)
    blue = (3 * width // 4, height // 2, width, height)
    (found,) = seeing().detect(picture(height, width, red, blue)[None])
    by_label = {d.label: d for d in found if d.score > 0.5}
    grain = 4 * max(height, width) / min(100, 64 * max(height, width) / min(height, width)) + 1
    for label, box in (("cup", red), ("dog", blue)):
        assert by_label[label].box == pytest.approx(box, abs=grain)
    assert (by_label["dog"].box[2], by_label["dog"].box[3]) == (width, height)


# --- colours and hints


def test_only_what_is_asked_for_is_found_and_coloured():
    both = picture(64, 96, (5, 5, 40, 50), (60, 20, 90, 60))
    watching = seeing()
    found = watching.detect(torch.stack([both] * 2), [Hint(0.3, frozenset({"dog"})), Hint(1.0, ALL)])
    assert [{(d.label, d.color) for d in f} for f in found] == [{("dog", "green"), ("cup", None)}, set()]
    assert [label for label, _ in watching._loaded[1].asked] == ["dog"]
    many = seeing(lambda c, m: (c[:, :1].repeat(1, 30, 1), m[:, :1].repeat(1, 30, 1, 1)))
    (found,) = many.detect(both[None], [Hint(0.3, ALL)])
    assert [d.color for d in found] == ["green"] * 16 + [None] * 14


# --- failures


CUP = Prompt("a photo of a cup", {"tag": "single_object", "include": [{"class": "cup", "count": 1}]})


def spoil(where, value):
    def change(classes, masks):
        (classes if where == "classes" else masks)[0, 0] = value
        return classes, masks

    return change


@pytest.mark.parametrize("where", ["classes", "masks"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_answers_are_not_zeros(where, value, caplog):
    reward = GenEval(seeing(spoil(where, value)))
    batch = torch.stack([picture(64, 64, (8, 8, 50, 50)), picture(64, 64, (8, 8, 50, 50)), picture(64, 64)])
    with caplog.at_level(logging.WARNING):
        scores = reward(batch, [CUP] * 3)
    assert scores.isnan().tolist() == [True, False, False]
    assert scores[1:].tolist() == [1, 0]
    assert "logits are NaN or infinite" in caplog.text


def test_wrong_shapes_are_failures(caplog):
    reward = GenEval(seeing(lambda classes, masks: (classes[..., :-1], masks)))
    with caplog.at_level(logging.WARNING):
        assert reward(picture(64, 64)[None], [CUP]).isnan().all()
    assert "logits have the shapes [2, 80] and [2, 16, 16]" in caplog.text


@pytest.mark.parametrize(("number", "broken"), [(15, False), (16, True)])
def test_a_detector_that_never_marks_a_pixel_is_broken(number, broken, caplog):
    reward = GenEval(seeing(lambda classes, masks: (classes, masks.clamp(max=-1))))
    plain = torch.stack([picture(64, 64)] * number)
    with caplog.at_level(logging.WARNING):
        scores = reward(plain, [CUP] * number)
    assert scores.isnan().tolist() == [broken] * number
    assert ("marks no pixel" in caplog.text) == broken
    # One mark in one image is enough for it to work.
    plain[3] = picture(64, 64, (8, 8, 50, 50))
    assert GenEval(seeing())(plain, [CUP] * number).tolist() == [float(i == 3) for i in range(number)]


def test_a_broken_clip_is_a_failure():
    watching = seeing()
    watching._loaded[1].name = lambda *anything: None
    (found,) = watching.detect(picture(64, 64, (8, 8, 50, 50))[None], [Hint(0.3, ALL)])
    assert found == Failure("CLIP's answer about colours is NaN or infinite")


# --- as part of a reward


def test_a_reward_from_files(files):
    reward = GenEval(files.detector(threshold=0.0), mode="strict")
    batch = images(3, 64, 96)
    first = reward.detector.detect(batch[:1], [Hint(0.0, frozenset())])[0][0].label
    found = reward.detector.detect(batch, [Hint(0.0, frozenset({first}))] * 3)
    assert all(isinstance(d, Detection) and d.label in ALL for f in found for d in f)
    assert {d.color is None for d in found[0] if d.label == first} == {False}
    assert {d.color in COLORS for d in found[0] if d.label == first} == {True}
    assert {d.color for d in found[0] if d.label != first} == {None}
    counts = [sum(d.label == f[0].label for d in f) for f in found]
    prompts = [
        Prompt("p", {"include": [{"class": f[0].label, "count": min(n, 16)}]})
        for f, n in zip(found, counts, strict=True)
    ]
    assert reward(batch, prompts).tolist() == [1, 1, 1]
    assert list(reward.state_dict()) == list(reward.parameters()) == []
    twin = pickle.loads(pickle.dumps(reward))
    assert twin.detector._loaded is None
    assert twin(batch, prompts).tolist() == [1, 1, 1]
    single = [reward.detector.detect(image[None], [Hint(0.0, frozenset())])[0] for image in batch]
    for one, other in zip(single, found, strict=True):
        assert [d.box for d in one] == [d.box for d in other]
        assert [d.score for d in one] == pytest.approx([d.score for d in other], abs=1e-5)


def test_classes_are_in_cocos_order():
    assert len(set(COCO_CLASSES)) == 80
    known = {0: "person", 15: "cat", 32: "sports ball", 41: "cup", 56: "chair", 60: "dining table", 62: "tv"}
    renamed = {64: "computer mouse", 65: "tv remote", 66: "computer keyboard", 67: "cell phone", 79: "toothbrush"}
    assert {i: COCO_CLASSES[i] for i in (known | renamed)} == known | renamed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.0}, r"threshold must be in \[0, 1\), got 1.0"),
        ({"counting_threshold": -0.1}, "counting_threshold must be in .*, got -0.1"),
        ({"short_side": 900, "long_side": 800}, "short_side is 900 and long_side 800"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"clip_dtype": "int8"}, 'clip_dtype is "int8"'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Mask2FormerDetector(**options)


def test_validation_loads_nothing(files, tmp_path):
    fine = files.detector()
    fine.validate()
    assert fine._loaded is None
    with pytest.raises(ValueError, match="does not exist"):
        Mask2FormerDetector("./nowhere.pth").validate()
    with pytest.raises(ValueError, match=r"expected a folder in transformers' layout, with a config\.json"):
        Mask2FormerDetector(str(tmp_path)).validate()
    with pytest.raises(ValueError, match=r"does not know.*expected one of person"):
        GenEval(fine)(images(1), [Prompt("p", {"include": [{"class": "mouse", "count": 1}]})])
    with pytest.raises(ValueError, match="the color 'grey', which Mask2FormerDetector does not know"):
        GenEval(fine)(images(1), [Prompt("p", {"include": [{"class": "cup", "count": 1, "color": "grey"}]})])
    assert fine._loaded is None
