"""A prompt and its metadata, and the text that it asks to be drawn."""

import re
from dataclasses import dataclass, field
from typing import Any

_DIGIT = r"[\d½⅓⅔¼¾⅛]"


# Quoted spans in order of trust; of one kind, the first counts.
_QUOTED = (
    # A straight mark right after a digit is an inch mark (12", 5'10"), never an opening quote; nor is one that stands
    # alone after a digit (6 " pipe).
    re.compile(rf'(?<!{_DIGIT})(?!(?<={_DIGIT} )"\s)"([^"“”]*)"'),
    re.compile(r"“([^“”]*)”|„([^„“”]*)[“”]|«([^«»]*)»|「([^「」]*)」"),
    # A single quote opens only at the start of a word and closes only at the end of one, so apostrophes do not count;
    # nor do those that stand for lost letters or digits ('tis, rock 'n' roll, '80s).
    re.compile(
        r"(?<!\w)['‘](?=\w)(?!(?:tis|twas|twere|twill|til|till|cause|cos|em|n|bout|round|\d\ds?)\b)"
        r"((?:[^'’‘]|(?<=\w)['’](?=\w)){2,}?)['’](?!\w)",
        re.IGNORECASE,
    ),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt and what the rewards need to know about it.

    Attributes:
        text: The prompt itself, as the policy sees it.
        metadata: GenEval's schema (``tag``, ``include``, ``exclude``), ``ocr`` (the text to be drawn), and any other
            key.
    """

    text: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ocr_target(self) -> str | None:
        """The text that the image should show, or None if the prompt names none."""
        return self.metadata.get("ocr")


def find_ocr_target(text: str) -> str | None:
    r"""Find the text that a prompt asks to be drawn: its first quoted span.

    Straight double quotes win over curly double quotes (and „…“, «…», 「…」), wherever they stand, and these over single
    quotes. In single quotes, an apostrophe at the end of a word closes the span: double quotes are safer.

    Args:
        text: A prompt, for example ``A 12" record labelled "Blue"``.

    Returns:
        The text between the quotes, without surrounding white space, or None if nothing is quoted.

    Raises:
        ValueError: If the quotes are empty.

    Examples:
        >>> find_ocr_target('A 5\'10" man with a sign that says "Hello World"')
        'Hello World'
        >>> find_ocr_target("A bird's eye view of the dogs' park, 'tis said") is None
        True
    """
    for pattern in _QUOTED:
        match = pattern.search(text)
        if match:
            target = (match[match.lastindex or 1] or "").strip()
            if not target:
                raise ValueError(
                    f"The quoted text in the prompt {text!r} is empty: put the text to be drawn between the quotes."
                )
            return target
    return None
