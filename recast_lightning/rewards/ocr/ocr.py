"""OCR: does the image show the text that the prompt quotes?"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.ranges import check_ranges
from recast_lightning.rewards.base import RewardModel, check_choice, require_package
from recast_lightning.rewards.ocr.engine import last_line, load_engine, read_lines, read_page
from recast_lightning.rewards.ocr.onnx_file import onnx_metadata
from recast_lightning.rewards.ocr.score import Substring, letters, ocr_score
from recast_lightning.rewards.preprocessing import Picture, as_pictures

_WHOLE = (0.0, 0.0, 1.0, 1.0)


class OCR(RewardModel):
    """Legibility of the quoted text, read by RapidOCR and scored by :func:`ocr_score`.

    RapidOCR runs PP-OCR in ONNX Runtime, and its wheel carries the weights (PP-OCRv6 small), which read better than the
    PP-OCRv3 and v4 behind published scores. An image without any text scores 0. If the engine fails on an image, that
    image scores NaN. Each process, forked ones included, loads an engine of its own.

    Args:
        detect: Find the lines of text, then read each. If False, read one line straight from
            ``metadata["text_region"]`` (x0, y0, x1, y1 as fractions of width and height; the whole image where it is
            missing): several times faster.
        min_side: With `detect`, smaller images are enlarged until their shorter side has this many pixels.
        min_confidence: Lines that the recogniser trusts less than this are dropped.
        threads: CPU threads that the engine may use.
        substring: Where a target of one or two letters may stand, see :func:`ocr_score`.
        detector_model: A local ONNX file of PP-OCR's to replace the text detector.
        recogniser_model: A local ONNX file of PP-OCR's to replace the recogniser.
        dictionary: The characters of `recogniser_model`, one a line, if that file does not hold them itself.
    """

    name = "ocr"
    needs = ("ocr",)
    version = "PP-OCRv6 small"
    licence = "Apache-2.0"
    workers = "processes"

    def __init__(
        self,
        *,
        detect: bool = True,
        min_side: int = 256,
        min_confidence: float = 0.5,
        threads: int = 1,
        substring: Substring = "word",
        detector_model: str | None = None,
        recogniser_model: str | None = None,
        dictionary: str | None = None,
    ) -> None:
        super().__init__()
        check_ranges(
            {"min_side": min_side, "min_confidence": min_confidence, "threads": threads},
            {"min_side": "[32, inf)", "min_confidence": "[0, 1]", "threads": "[1, inf)"},
        )
        check_choice("substring", substring, get_args(Substring))
        self.detect = detect
        self.min_side = min_side
        self.min_confidence = min_confidence
        self.threads = threads
        self.substring: Substring = substring
        self.detector_model = detector_model
        self.recogniser_model = recogniser_model
        self.dictionary = dictionary
        own = [Path(file).name for file in (detector_model, recogniser_model) if file is not None]
        if own:
            self.version = ", ".join(own)
        self._process = os.getpid()

    def validate(self) -> None:
        """Check, without loading anything, that packages and files are there and fit together.

        Raises:
            ValueError: If not.
        """
        for package in ("rapidocr", "onnxruntime", "rapidfuzz"):
            require_package(package, "OCR")
        if self.detector_model is not None:
            onnx_metadata(self.detector_model)
        if self.dictionary is not None and not Path(self.dictionary).is_file():
            raise ValueError(f"The OCR dictionary {self.dictionary} does not exist: expected one character a line.")
        has_own = self.recogniser_model is None or "character" in onnx_metadata(self.recogniser_model)
        if (self.dictionary is None) != has_own:
            fault = "holds its characters: leave dictionary out" if has_own else "lacks its characters: give dictionary"
            raise ValueError(f"The OCR recogniser {self.recogniser_model or 'of RapidOCR'} {fault}.")

    def load(self) -> Any:
        """Return the engine, reading it on the first call of each process: a forked child must not use its parent's."""
        if self._process != os.getpid():
            self._process, self._loaded = os.getpid(), None
        return super().load()

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check targets and text regions.

        Raises:
            ValueError: Naming the first prompt without a target or with a malformed region.
        """
        super().check_prompts(prompts)
        for prompt in prompts:
            target = prompt.metadata["ocr"]
            if not isinstance(target, str) or not letters(target):
                raise ValueError(
                    f'The key "ocr" of the prompt {prompt.text!r} is {target!r}: expected the text to be drawn.'
                )
            region = prompt.metadata.get("text_region", _WHOLE)
            if not _is_region(region):
                raise ValueError(
                    f'The key "text_region" of the prompt {prompt.text!r} is {region}: '
                    "expected [x0, y0, x1, y1], fractions in [0, 1] with x0 < x1 and y0 < y1."
                )

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]): [B] in [0, 1], NaN where the engine fails."""
        self.load()
        texts = self.read(images, prompts)
        return torch.tensor(
            [
                torch.nan if text is None else ocr_score(text, prompt.metadata["ocr"], self.substring)
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        )

    def read(self, images: Tensor, prompts: Sequence[Prompt]) -> list[str | None]:
        """Read images [B, 3, H, W] (float32 in [0, 1]): lines parted by line breaks; None where the engine fails."""
        if self.detect:
            read = partial(read_page, self.load())
            return [self._attempt(read, picture) for picture in _pictures(_enlarge(images, self.min_side))]
        crops = [_crop(picture, prompt) for picture, prompt in zip(_pictures(images), prompts, strict=True)]
        texts: list[str | None] = [None] * len(crops)
        # The engine pads the crops of a call to the widest. Crops of one size need no padding, so a text cannot depend
        # on what else is in the batch.
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, crop in enumerate(crops):
            groups[crop.shape].append(i)
        for members in groups.values():
            for i, text in zip(members, self._read_lines_safely([crops[i] for i in members]), strict=True):
                texts[i] = text
        return texts

    def _read_lines_safely(self, crops: list[Picture]) -> Sequence[str | None]:
        """Read all crops in one call; if that fails, one by one, so that only the culprit is lost."""
        try:
            return read_lines(self.load(), crops, self.min_confidence)
        except Exception:
            return [self._attempt(self._read_line, crop) for crop in crops]

    def _read_line(self, crop: Picture) -> str:
        return read_lines(self.load(), [crop], self.min_confidence)[0]

    def _attempt(self, read: Callable[[Picture], str], picture: Picture) -> str | None:
        try:
            return read(picture)
        except Exception as error:
            self._report(f"the OCR engine failed with {last_line(error)}")
            return None

    def _load(self) -> Any:
        return load_engine(
            detect=self.detect,
            min_side=self.min_side,
            min_confidence=self.min_confidence,
            threads=self.threads,
            detector_model=self.detector_model,
            recogniser_model=self.recogniser_model,
            dictionary=self.dictionary,
        )


def _crop(picture: Picture, prompt: Prompt) -> Picture:
    """Cut out the text region, at least one pixel large."""
    height, width = picture.shape[:2]
    x0, y0, x1, y1 = prompt.metadata.get("text_region", _WHOLE)
    left, top = min(int(x0 * width), width - 1), min(int(y0 * height), height - 1)
    return picture[top : max(round(y1 * height), top + 1), left : max(round(x1 * width), left + 1)]


def _enlarge(images: Tensor, min_side: int) -> Tensor:
    """Scale images [B, 3, H, W] up (bicubic) until the shorter side has `min_side` pixels."""
    factor = min_side / min(images.shape[-2:])
    if factor <= 1:
        return images
    size = [round(side * factor) for side in images.shape[-2:]]
    return F.interpolate(images, size, mode="bicubic").clamp(0, 1)


def _pictures(images: Tensor) -> list[Picture]:
    """Images [B, 3, H, W] in [0, 1] as the engine takes them: blue first."""
    return as_pictures(images.flip(1))


def _is_region(region: Any) -> bool:
    if not isinstance(region, (list, tuple)) or [type(x) in (int, float) for x in region] != [True] * 4:
        return False
    x0, y0, x1, y1 = region
    return 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1
