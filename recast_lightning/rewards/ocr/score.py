"""How well recognised text agrees with its target."""

import re
import unicodedata
from typing import Literal

Substring = Literal["word", "anywhere"]
# The recogniser, made for more than English, may answer in full-width Latin letters, and it takes shapes for symbols.
_PLAIN_TEXT: dict[int, int | None] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(range(0x25A0, 0x2700)),  # circles, squares, triangles, stars: dropped
}


def ocr_score(recognised: str, target: str, substring: Substring = "word") -> float:
    r"""Score recognised text: 1 if it contains the target, else 1 - min(edit distance, n) / n with n = len(target).

    Both sides are lower-cased and lose their spaces and line breaks first; punctuation counts. A target of one or two
    letters lies in almost every text by chance (NO in KNOT), so with `word` it must stand there as a word of its own:
    no letter or digit right before or after it.

    Args:
        recognised: All recognised lines, one a line, in reading order.
        target: The text that should be there.
        substring: ``anywhere`` lets short targets match inside words, too, as DiffusionNFT and Flow-GRPO do.

    Raises:
        ValueError: If nothing remains of the target.

    Examples:
        >>> [ocr_score(text, "Hello World") for text in ("HELLO\nWORLD 2024", "helo world", "")]
        [1.0, 0.9, 0.0]
        >>> [ocr_score("KNOT", "NO", rule) for rule in ("word", "anywhere")]
        [0.0, 1.0]
    """
    from rapidfuzz.distance import Levenshtein

    whole, wanted = letters(recognised), letters(target)
    n = len(wanted)
    if n == 0:
        raise ValueError("The OCR target is empty: it needs at least one character that is no space and no shape.")
    contained = wanted in whole
    if contained and substring == "word" and n <= 2:
        word = r"\s*".join(map(re.escape, wanted))
        contained = re.search(rf"(?<!\w){word}(?!\w)", _plain(recognised)) is not None
    return 1.0 if contained else 1 - min(Levenshtein.distance(whole, wanted), n) / n


def plain_text(text: str) -> str:
    """Full-width Latin letters as plain ones, and without geometric shapes."""
    return text.translate(_PLAIN_TEXT)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", plain_text(text)).lower()


def letters(text: str) -> str:
    """What is compared: composed, in lower case, and without spaces and line breaks."""
    return "".join(_plain(text).split())
