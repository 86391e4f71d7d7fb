import copy
import logging
import multiprocessing
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import rapidocr
import torch
from helpers.pictures import sign, text_picture
from rapidocr.main import RapidOCRError

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import OCR
from recast_lightning.rewards.ocr.onnx_file import onnx_metadata

BOTTOM, TOP = [0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 1.0, 0.5]


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
    blank = torch.full((2, 3, 64, 64), 0.9)
    assert line_reader(blank, prompts).tolist() == [0, 0]
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
        ({"ocr": "★"}, "is '★': expected the text to be drawn"),
        ({"ocr": ["x"]}, "expected the text to be drawn"),
        ({"ocr": "x", "text_region": [0, 0, 1]}, r'"text_region" of the prompt \'a cat\' is \[0, 0, 1\]: expected'),
        ({"ocr": "x", "text_region": [0, 0.5, 1, 0.5]}, "x0 < x1 and y0 < y1"),
        ({"ocr": "x", "text_region": 5}, "is 5: expected"),
        ({"ocr": "x", "text_region": [0, 0, "1", None]}, "x0 < x1 and y0 < y1"),
    ],
)
def test_prompts_are_checked_first(metadata, message):
    with pytest.raises(ValueError, match=message):
        OCR()(torch.rand(1, 3, 8, 8), [Prompt("a cat", metadata)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_side": 8}, "min_side must be at least 32, got 8"),
        ({"min_confidence": 2}, r"min_confidence must be in \[0, 1\], got 2"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"substring": "some"}, 'substring is "some": expected one of word, anywhere'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        OCR(**options)


def output(count, texts, scores=None):
    return SimpleNamespace(txts=texts, scores=scores or [0.9] * count, boxes=[None] * count)


@pytest.mark.parametrize(
    ("detect", "found", "scores", "reason"),
    [
        (True, SimpleNamespace(txts=None, boxes=None), [0, 0], None),
        (True, SimpleNamespace(boxes=[1]), [0, 0], None),  # lines were found, but nothing could be read
        (False, SimpleNamespace(txts=None, scores=None), [0, 0], None),
        (False, RapidOCRError("empty"), [0, 0], None),
        (True, output(2, ["SHORT"]), [None, None], "RuntimeError: it read 1 texts in 2 lines"),
        (False, output(3, ["A", "B", "C"]), [None, None], "RuntimeError: it read 3 texts in 1 lines"),
        (True, output(2, ["HELLO", "WORLD"]), [1, 1], None),
        (False, output(2, ["HELLO WORLD", "world"]), [1, 0.5], None),
    ],
)
def test_nothing_read_is_0_and_a_wrong_count_is_nan(detect, found, scores, reason, monkeypatch, caplog):
    def answer(*_):
        if isinstance(found, Exception):
            raise found
        return found

    class Engine:
        __call__ = recognize_txt = answer

    reward = OCR(detect=detect)
    monkeypatch.setattr(reward, "_loaded", Engine())
    with caplog.at_level(logging.WARNING):
        got = reward(torch.rand(2, 3, 8, 8), [Prompt("p", {"ocr": "Hello World"})] * 2).tolist()
    assert [None if score != score else score for score in got] == scores
    assert [reason in record.getMessage() for record in caplog.records] == ([True] if reason else [])


def test_substring_reaches_the_score(line_reader, monkeypatch):
    image, prompt = torch.rand(1, 3, 8, 8), [Prompt("p", {"ocr": "NO"})]
    for rule, score in (("word", 0), ("anywhere", 1)):
        reward = OCR(detect=False, substring=rule)
        monkeypatch.setattr(reward, "_loaded", SimpleNamespace(recognize_txt=lambda _: output(1, ["KNOT"])))
        assert reward(image, prompt).item() == score


@pytest.fixture(scope="module")
def own_files(tmp_path_factory, line_reader):
    """The wheel's recogniser without its characters, these as a dictionary, and the detector; as PaddleOCR ships them."""
    folder, source = tmp_path_factory.mktemp("models"), Path(rapidocr.__file__).parent / "models"
    data = next(source.glob("*rec*.onnx")).read_bytes()
    bare = data.replace(b"\n\x09character", b"\n\x09charactex")
    assert bare != data
    (folder / "rec.onnx").write_bytes(bare)
    line_reader.load()
    characters = line_reader.load().text_rec.postprocess_op.character[1:-1]
    (folder / "dict.txt").write_text("\n".join(characters) + "\n", encoding="utf-8", newline="\n")
    (folder / "short.txt").write_text("\n".join(characters[1:]) + "\n", encoding="utf-8", newline="\n")
    (folder / "det.onnx").symlink_to(next(source.glob("*det*.onnx")))
    (folder / "whole.onnx").symlink_to(next(source.glob("*rec*.onnx")))
    return folder


def test_own_models(own_files, line_reader):
    own = OCR(
        min_side=128,
        detector_model=str(own_files / "det.onnx"),
        recogniser_model=str(own_files / "rec.onnx"),
        dictionary=str(own_files / "dict.txt"),
    )
    assert own(text_picture("HELLO", "WORLD")[None], [Prompt("p", {"ocr": "Hello World"})]).item() == 1
    assert (own.version, OCR().version) == ("det.onnx, rec.onnx", "PP-OCRv6 small")
    assert onnx_metadata(own_files / "whole.onnx") >= {"character"}


@pytest.mark.parametrize(
    ("recogniser", "dictionary", "message"),
    [
        ("rec.onnx", None, r"The OCR recogniser .*rec\.onnx lacks its characters: give dictionary\."),
        ("whole.onnx", "dict.txt", r"recogniser .*whole\.onnx holds its characters: leave dictionary out"),
        (None, "dict.txt", "recogniser of RapidOCR holds its characters: leave dictionary out"),
        ("rec.onnx", "none.txt", r"OCR dictionary .*none\.txt does not exist: expected one character a line"),
    ],
)
def test_recogniser_and_dictionary_must_fit(own_files, recogniser, dictionary, message):
    paths = [None if name is None else str(own_files / name) for name in (recogniser, dictionary)]
    with pytest.raises(ValueError, match=message):
        OCR(recogniser_model=paths[0], dictionary=paths[1]).validate()


def test_a_dictionary_of_the_wrong_length_is_found_on_loading(own_files):
    ocr = OCR(detect=False, recogniser_model=str(own_files / "rec.onnx"), dictionary=str(own_files / "short.txt"))
    with pytest.raises(
        ValueError, match=r"short\.txt holds (\d+) characters, but the recogniser .* tells \d+ apart"
    ) as e:
        ocr.load()
    held, told = (int(word) for word in str(e.value).split() if word.isdigit())
    assert told == held + 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", r"bad\.onnx is not a \(whole\) ONNX file"),
        (b"", "is not a"),
        (b"\x08\x07\x12\x02ab", "is not a"),  # no graph
        (b"\x08\x07\x3a\x7fab", "is not a"),  # cut off
    ],
)
def test_what_is_no_onnx_file_is_refused(tmp_path, content, message):
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        OCR(detector_model=str(tmp_path / "bad.onnx")).validate()


def test_a_model_that_does_not_run_is_an_error_not_nan(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x07\x3a\x02ab")
    reward = OCR(detector_model=str(tmp_path / "bad.onnx"))
    reward.validate()
    with pytest.raises(ValueError, match="The OCR models cannot be used: "):
        reward(torch.rand(1, 3, 64, 64), [Prompt("p", {"ocr": "x"})])


def test_no_engine_is_shared(line_reader, monkeypatch):
    engine = line_reader.load()
    assert line_reader.load() is engine
    for twin in (copy.deepcopy(line_reader), pickle.loads(pickle.dumps(line_reader))):
        assert twin._loaded is None
        assert twin.load() is not engine
    monkeypatch.setattr(OCR, "_load", lambda self: f"engine of {os.getpid()}")
    reward = OCR()
    assert reward.load() == f"engine of {os.getpid()}"
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(reward.load()))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == f"engine of {child.pid}"
    assert reward.load() == f"engine of {os.getpid()}"


def test_missing_files_and_packages(monkeypatch):
    with pytest.raises(ValueError, match=r"model /no/det\.onnx does not exist"):
        OCR(detector_model="/no/det.onnx").validate()
    with pytest.raises(ValueError, match=r"model /no/rec\.onnx does not exist"):
        OCR(recogniser_model="/no/rec.onnx").load()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="OCR needs the package rapidocr, which is not installed: pip install rapidocr"
    ):
        OCR().validate()
