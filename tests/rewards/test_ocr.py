import logging

import pytest
import torch
from helpers.pictures import sign, text_picture

from recast_lightning.prompts import Prompt
from recast_lightning.rewards import OCR
from recast_lightning.rewards.ocr import ocr_score

BOTTOM, TOP = [0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("recognised", "target", "score"),
    [
        ("HELLO WORLD 2024", "Hello World", 1.0),
        ("helo world", "Hello World", 0.9),
        ("", "Hello World", 0.0),
        ("zzzzzzzzzzzzzzzz", "Hello World", 0.0),
        ("h e l l oworld", "Hello World", 1.0),
        ("Hello, World", "Hello World", 0.9),  # punctuation counts
        ("xxHELLO WORLDxx", "Hello World", 1.0),
        ("ABD", "abc", 2 / 3),
        ("a", "A", 1.0),
        ("AB", "A", 0.0),  # one letter is no lottery
        ("xyzA", "A", 0.0),
        (" a ", "A", 1.0),
    ],
)
def test_score(recognised, target, score):
    assert ocr_score(recognised, target) == pytest.approx(score)


def test_score_agrees_with_a_slow_edit_distance():
    def distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            row, last = [i], row
            for j, y in enumerate(b, 1):
                row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y)))
        return row[-1]

    generator = torch.Generator().manual_seed(0)
    words = [
        "".join("abc"[i] for i in torch.randint(3, (n,), generator=generator)) for n in range(2, 9) for _ in range(8)
    ]
    for a, b in zip(words, reversed(words), strict=True):
        expected = 1.0 if b in a else 1 - min(distance(a, b), len(b)) / len(b)
        assert ocr_score(a, b) == pytest.approx(expected)


def test_empty_target():
    with pytest.raises(ValueError, match="OCR target is empty"):
        ocr_score("x", "  ")


@pytest.fixture(scope="module")
def reader():
    return OCR()


@pytest.fixture(scope="module")
def line_reader():
    return OCR(detect=False)


def test_reads_pictures(reader):
    images = torch.stack([text_picture("HELLO WORLD"), text_picture("HELLO", "WORLD"), text_picture("")])
    prompts = [Prompt("p", {"ocr": "Hello World"})] * 3
    assert reader(images, prompts).tolist() == [1, 1, 0]
    assert reader.failed == 0
    wrong = reader(images[:1], [Prompt("p", {"ocr": "Hello Earth"})])
    assert wrong.item() == pytest.approx(1 - 4 / 10)  # e, a, t, h for o, r, l, d: as strings "world" and "earth"


def test_colours_reach_the_engine_in_its_order(reader, monkeypatch):
    seen = []
    engine = reader.load()
    monkeypatch.setattr(reader, "_loaded", lambda picture: seen.append(picture) or engine(picture))
    red = torch.zeros(1, 3, 256, 300)
    red[:, 0] = 1
    reader(red, [Prompt("p", {"ocr": "x"})])
    assert seen[0].shape == (256, 300, 3)
    assert seen[0][0, 0].tolist() == [0, 0, 255]  # blue first


def test_small_signs_are_enlarged(reader):
    image = sign([("circle", "red", 20, 15, 16), ("star", "blue", 44, 15, 16)], "KOT")[None]
    assert reader(image, [Prompt("p", {"ocr": "kot"})]).item() == 1


def test_text_region(line_reader):
    shapes = [("circle", "red", 20, 15, 18), ("square", "blue", 44, 15, 18)]
    images = torch.stack(
        [sign(shapes, "KAT"), sign([(s, c, x, 64 - y, d) for s, c, x, y, d in shapes], "LUC", text_y=16)]
    )
    prompts = [Prompt("p", {"ocr": "KAT", "text_region": BOTTOM}), Prompt("p", {"ocr": "LUC", "text_region": TOP})]
    assert line_reader(images, prompts).tolist() == [1, 1]
    swapped = [Prompt("p", {**p.metadata, "text_region": r}) for p, r in zip(prompts, (TOP, BOTTOM), strict=True)]
    assert max(line_reader(images, swapped).tolist()) < 1
    whole = text_picture("EXIT", size=(160, 48), height=32)[None]
    assert line_reader(whole, [Prompt("p", {"ocr": "exit"})]).item() == 1


@pytest.mark.parametrize("detect", [True, False])
def test_text_does_not_depend_on_the_batch(detect, reader, line_reader):
    words = ["AC", "KEN", "TULO", "VAN", "NO", "ELK"]
    images = torch.stack([sign([("star", "green", 32, 15, 18)], word) for word in words]).float() / 255
    images = (images + 0.15 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    regions = [BOTTOM, [0, 0.4, 1, 1], BOTTOM, [0.1, 0.5, 0.9, 0.95], [0, 0, 1, 1], BOTTOM]  # crops of several widths
    prompts = [Prompt("p", {"ocr": word, "text_region": region}) for word, region in zip(words, regions, strict=True)]
    engine = reader if detect else line_reader
    together = engine.read(images, prompts)
    assert together == [engine.read(images[i : i + 1], prompts[i : i + 1])[0] for i in range(len(words))]
    assert together == engine.read(images.flip(0), prompts[::-1])[::-1]
    assert len(set(together)) > 3


@pytest.mark.parametrize("detect", [True, False])
def test_a_failing_engine_costs_one_image(detect, reader, line_reader, monkeypatch, caplog):
    original = reader if detect else line_reader
    images = torch.stack([text_picture("HELLO", size=(96, 48), height=28)] * 3)
    images[1] = 77
    prompts = [Prompt("p", {"ocr": "hello"})] * 3
    engine = original.load()

    class Fragile:
        def __call__(self, picture):
            if picture.max() == 77:
                raise RuntimeError("trace\nsession is gone")
            return engine(picture)

        def recognize_txt(self, crops):
            for crop in crops:
                self(crop)
            return engine.recognize_txt(crops)

    reward = OCR(detect=detect)
    monkeypatch.setattr(reward, "_loaded", Fragile())
    with caplog.at_level(logging.WARNING):
        scores = [reward(images, prompts), reward(images, prompts)]
    for score in scores:
        assert score.isnan().tolist() == [False, True, False]
        assert score[[0, 2]].tolist() == [1, 1]
    assert reward.failed == 2
    assert [r.getMessage() for r in caplog.records] == [
        "ocr could not score an image: the OCR engine failed with RuntimeError: session is gone (NaN; said once)"
    ]


def test_unsure_lines_are_dropped():
    image = sign([], "KAT")[None]
    prompt = [Prompt("p", {"ocr": "KAT", "text_region": BOTTOM})]
    assert OCR(detect=False, min_confidence=0.0)(image, prompt).item() == 1
    assert OCR(detect=False, min_confidence=1.0)(image, prompt).item() == 0


def test_symbols_go_and_full_width_letters_are_narrowed(line_reader, monkeypatch):
    class Wide:
        def recognize_txt(self, crops):
            return type("Output", (), {"txts": ["●★CＬａ■"], "scores": [0.9]})

    monkeypatch.setattr(line_reader, "_loaded", Wide())
    assert line_reader.read(torch.rand(1, 3, 8, 8), [Prompt("p")]) == ["CLa"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "ocr needs \"ocr\" in the metadata of each prompt, and 'a cat' has none: read the prompts with ocr=True"),
        ({"ocr": ""}, 'ocr needs "ocr"'),
        ({"ocr": " "}, "is ' ': expected the text to be drawn"),
        ({"ocr": ["x"]}, "expected the text to be drawn"),
        ({"ocr": "x", "text_region": [0, 0, 1]}, r'"text_region" of the prompt \'a cat\' is \[0, 0, 1\]: expected'),
        ({"ocr": "x", "text_region": [0, 0.5, 1, 0.5]}, "x0 < x1 and y0 < y1"),
    ],
)
def test_prompts_are_checked_first(metadata, message):
    with pytest.raises(ValueError, match=message):
        OCR()(torch.rand(1, 3, 8, 8), [Prompt("a cat", metadata)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_side": 8}, "min_side is 8: expected at least 32"),
        ({"min_confidence": 2}, r"min_confidence is 2: expected a number in \[0, 1\]"),
        ({"threads": 0}, "threads is 0: expected at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        OCR(**options)


def test_missing_files_and_packages(monkeypatch):
    with pytest.raises(ValueError, match=r"OCR model /no/det\.onnx does not exist"):
        OCR(detector_model="/no/det.onnx").validate()
    with pytest.raises(ValueError, match=r"OCR model /no/rec\.onnx does not exist"):
        OCR(recogniser_model="/no/rec.onnx").load()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="OCR needs the package rapidocr, which is not installed: pip install rapidocr"
    ):
        OCR().validate()
