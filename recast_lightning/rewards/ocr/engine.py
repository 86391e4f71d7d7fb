"""RapidOCR: building the engine, and reading pages or single lines with it."""

from typing import Any

import numpy as np

from recast_lightning.rewards.ocr.score import plain_text
from recast_lightning.rewards.preprocessing import Picture


def load_engine(
    *,
    detect: bool,
    min_side: int,
    min_confidence: float,
    threads: int,
    detector_model: str | None,
    recogniser_model: str | None,
    dictionary: str | None,
) -> Any:
    """Build a RapidOCR engine and let it read its files; the options are those of :class:`OCR`.

    Raises:
        ValueError: If the models cannot be used, or the dictionary does not fit the recogniser.
    """
    from rapidocr import RapidOCR

    params: dict[str, Any] = {
        "Global.use_cls": False,
        "Global.text_score": min_confidence,
        "Global.log_level": "critical",
        "EngineConfig.onnxruntime.intra_op_num_threads": threads,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        "Det.limit_side_len": min_side,
    }
    if not detect:
        params |= {"Rec.rec_img_shape": [3, 48, 48], "Rec.rec_batch_num": 32}  # width: that of the crops
    paths = {"Det.model": detector_model, "Rec.model": recogniser_model, "Rec.rec_keys": dictionary}
    params |= {f"{key}_path": path for key, path in paths.items() if path is not None}
    engine = RapidOCR(params=params)
    try:  # it reads its files only now
        blank = np.zeros((48, 48, 3), np.uint8)
        if detect:
            engine(blank)
        engine.recognize_txt([blank])
    except Exception as error:
        raise ValueError(f"The OCR models cannot be used: {last_line(error)}") from error
    if dictionary is not None:
        _check_dictionary(engine.text_rec, f"The OCR dictionary {dictionary}", f"the recogniser {recogniser_model}")
    return engine


def _check_dictionary(recogniser: Any, dictionary: str, model: str) -> None:
    """Without this, a dictionary of the wrong length would shift letters in silence."""
    classes = recogniser.session(np.zeros((1, 3, 48, 48), np.float32)).shape[-1]
    known = len(recogniser.postprocess_op.character)
    if known != classes:  # blank and space are not in the file
        raise ValueError(f"{dictionary} holds {known - 2} characters, but {model} tells {classes - 2} apart.")


def read_page(engine: Any, picture: Picture) -> str:
    """Find and read the lines of a picture [H, W, 3], blue first; a line each, in reading order."""
    output = engine(picture)
    texts = getattr(output, "txts", None)  # None: no text at all
    if texts is None:
        return ""
    if not len(texts) == len(output.scores) == len(output.boxes):
        raise RuntimeError(f"it read {len(texts)} texts in {len(output.boxes)} lines")
    return plain_text("\n".join(texts))


def read_lines(engine: Any, crops: list[Picture], min_confidence: float) -> list[str]:
    """Read the one line in each crop [H, W, 3], blue first; empty where the engine trusts it too little."""
    from rapidocr.main import RapidOCRError

    try:
        output = engine.recognize_txt(crops)
    except RapidOCRError:  # one of its two ways to say that there is no text at all
        output = None
    if output is None or output.txts is None:
        return [""] * len(crops)
    if not len(output.txts) == len(output.scores) == len(crops):
        raise RuntimeError(f"it read {len(output.txts)} texts in {len(crops)} lines")
    lines = zip(output.txts, output.scores, strict=True)
    return [plain_text(text) if score >= min_confidence else "" for text, score in lines]


def last_line(error: Exception) -> str:
    """Type and last line of an error; the engine's own messages are tracebacks."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
