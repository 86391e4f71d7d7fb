"""OCR: does the image show the text that the prompt quotes?"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from recast_lightning.prompts import Prompt
from recast_lightning.rewards.base import RewardModel, require_package

Picture = NDArray[np.uint8]  # [H, W, 3], blue first, as RapidOCR takes arrays
_WHOLE = (0.0, 0.0, 1.0, 1.0)
# The recogniser, made for more than English, may answer in full-width Latin letters, and it takes shapes for symbols.
_PLAIN_TEXT: dict[int, int | None] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(range(0x25A0, 0x2700)),  # circles, squares, triangles, stars: dropped
}


def ocr_score(recognised: str, target: str) -> float:
    """Score recognised text: 1 if it contains the target, else 1 - min(edit distance, n) / n with n = len(target).

    Both sides are lower-cased and lose their spaces first. A target of one letter must match as a whole, for almost
    every text contains it.

    Args:
        recognised: All recognised lines, joined without a separator.
        target: The text that should be there.

    Raises:
        ValueError: If the target has no character but spaces.

    Examples:
        >>> [ocr_score(text, "Hello World") for text in ("HELLO WORLD 2024", "helo world", "")]
        [1.0, 0.9, 0.0]
    """
    from rapidfuzz.distance import Levenshtein

    recognised, target = (text.replace(" ", "").lower() for text in (recognised, target))
    n = len(target)
    if n == 0:
        raise ValueError("The OCR target is empty: it needs at least one character that is not a space.")
    if recognised == target or (n > 1 and target in recognised):
        return 1.0
    return 1 - min(Levenshtein.distance(recognised, target), n) / n


class OCR(RewardModel):
    """Legibility of the quoted text, read by RapidOCR and scored by :func:`ocr_score`.

    RapidOCR runs PP-OCR in ONNX Runtime, and its wheel carries the weights. An image without any text scores 0. If the
    engine fails on an image, that image scores NaN.

    Args:
        detect: Find the lines of text, then read each. If False, read one line straight from
            ``metadata["text_region"]`` (x0, y0, x1, y1 as fractions of width and height; the whole image where it is
            missing): several times faster.
        min_side: With `detect`, smaller images are enlarged until their shorter side has this many pixels.
        min_confidence: Lines that the recogniser trusts less than this are dropped.
        threads: CPU threads that the engine may use.
        detector_model: A local ONNX file to replace the text detector.
        recogniser_model: A local ONNX file to replace the recogniser.
    """

    name = "ocr"
    needs = ("ocr",)

    def __init__(
        self,
        *,
        detect: bool = True,
        min_side: int = 256,
        min_confidence: float = 0.5,
        threads: int = 1,
        detector_model: str | None = None,
        recogniser_model: str | None = None,
    ) -> None:
        super().__init__()
        if min_side < 32:
            raise ValueError(f"min_side is {min_side}: expected at least 32 pixels.")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence is {min_confidence}: expected a number in [0, 1].")
        if threads < 1:
            raise ValueError(f"threads is {threads}: expected at least 1.")
        self.detect = detect
        self.min_side = min_side
        self.min_confidence = min_confidence
        self.threads = threads
        self.detector_model = detector_model
        self.recogniser_model = recogniser_model

    def validate(self) -> None:
        """Check, without loading anything, that packages and files are there.

        Raises:
            ValueError: If one is missing.
        """
        for package in ("rapidocr", "onnxruntime", "rapidfuzz"):
            require_package(package, "OCR")
        for file in (self.detector_model, self.recogniser_model):
            if file is not None and not Path(file).is_file():
                raise ValueError(f"The OCR model {file} does not exist: expected a local ONNX file.")

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check targets and text regions.

        Raises:
            ValueError: Naming the first prompt without a target or with a malformed region.
        """
        super().check_prompts(prompts)
        for prompt in prompts:
            target = prompt.metadata["ocr"]
            if not isinstance(target, str) or not target.replace(" ", ""):
                raise ValueError(
                    f'The key "ocr" of the prompt {prompt.text!r} is {target!r}: expected the text to be drawn.'
                )
            region = prompt.metadata.get("text_region", _WHOLE)
            if len(region) != 4 or not (0 <= region[0] < region[2] <= 1 and 0 <= region[1] < region[3] <= 1):
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
                torch.nan if text is None else ocr_score(text, prompt.metadata["ocr"])
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        )

    def read(self, images: Tensor, prompts: Sequence[Prompt]) -> list[str | None]:
        """Read the text in images [B, 3, H, W] (float32 in [0, 1]); None where the engine fails."""
        if self.detect:
            return [self._attempt(self._read_page, picture) for picture in _pictures(_enlarge(images, self.min_side))]
        crops = [_crop(picture, prompt) for picture, prompt in zip(_pictures(images), prompts, strict=True)]
        texts: list[str | None] = [None] * len(crops)
        # The engine pads the crops of a call to the widest. Crops of one size need no padding, so a text cannot depend
        # on what else is in the batch.
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, crop in enumerate(crops):
            groups[crop.shape].append(i)
        for members in groups.values():
            read = self._read_lines_safely([crops[i] for i in members])
            for i, text in zip(members, read, strict=True):
                texts[i] = text
        return texts

    def _read_page(self, picture: Picture) -> str:
        return "".join(self.load()(picture).txts or ()).translate(_PLAIN_TEXT)

    def _read_lines(self, crops: list[Picture]) -> list[str]:
        output = self.load().recognize_txt(crops)
        lines = zip(output.txts, output.scores, strict=True)
        return [text.translate(_PLAIN_TEXT) if score >= self.min_confidence else "" for text, score in lines]

    def _read_lines_safely(self, crops: list[Picture]) -> Sequence[str | None]:
        """Read all crops in one call; if that fails, one by one, so that only the culprit is lost."""
        try:
            return self._read_lines(crops)
        except Exception:
            return [self._attempt(lambda crop: self._read_lines([crop])[0], crop) for crop in crops]

    def _attempt(self, read: Callable[[Picture], str], picture: Picture) -> str | None:
        try:
            return read(picture)
        except Exception as error:
            last_line = (str(error).strip().splitlines() or [""])[-1]
            self._report(f"the OCR engine failed with {type(error).__name__}: {last_line}")
            return None

    def _load(self) -> Any:
        from rapidocr import RapidOCR

        params: dict[str, Any] = {
            "Global.use_cls": False,
            "Global.text_score": self.min_confidence,
            "Global.log_level": "critical",
            "EngineConfig.onnxruntime.intra_op_num_threads": self.threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Det.limit_side_len": self.min_side,
        }
        if not self.detect:
            params |= {"Rec.rec_img_shape": [3, 48, 48], "Rec.rec_batch_num": 32}  # width: that of the crops
        if self.detector_model is not None:
            params["Det.model_path"] = self.detector_model
        if self.recogniser_model is not None:
            params["Rec.model_path"] = self.recogniser_model
        return RapidOCR(params=params)


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
    """Images [B, 3, H, W] in [0, 1] as arrays for the engine."""
    return list((images.flip(1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy())
