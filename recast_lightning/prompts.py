"""Prompts, their metadata, and the two file formats they are read from."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
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


def read_prompts(path: str | Path, *, ocr: bool = False) -> list[Prompt]:
    """Read prompts from a ``.txt`` file (one a line) or a ``.jsonl`` file (one object a line, with the key ``prompt``).

    Blank lines are skipped, and surrounding white space is removed. All keys of a JSON object but ``prompt`` become
    metadata.

    Args:
        path: The file, in UTF-8.
        ocr: Decide an OCR target for every prompt: the key ``ocr`` if the file gives it, else the first quoted span.

    Raises:
        ValueError: If the file is missing, malformed or empty, or if ``ocr`` is set and a prompt has no target.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(
            f"The prompt file {path} must be a .txt file (one prompt a line) or a .jsonl file (one object a line)."
        )
    if not path.is_file():
        raise ValueError(f"The prompt file {path} does not exist.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompt file {path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from error

    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    numbered = [(i, parse(line.strip(), f"{path}, line {i}")) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"The prompt file {path} holds no prompts.")
    return _with_ocr_targets(numbered, path) if ocr else [prompt for _, prompt in numbered]


def _parse_text(line: str, where: str) -> Prompt:
    return Prompt(line)


def _parse_json(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
    text = item.pop("prompt", None) if isinstance(item, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{where}: expected a JSON object with the text of the prompt under the key "prompt".')
    return Prompt(text.strip(), item)


def _with_ocr_targets(numbered: Sequence[tuple[int, Prompt]], path: Path) -> list[Prompt]:
    """Add ``metadata["ocr"]`` where it is missing; one error names all lines where that is not possible, and why."""
    prompts: list[Prompt] = []
    bad: dict[str, list[int]] = {}
    for line, prompt in numbered:
        reason, target = "nothing is quoted", prompt.metadata.get("ocr")
        if "ocr" in prompt.metadata:
            reason = 'the key "ocr" holds no text'
        else:
            try:
                target = find_ocr_target(prompt.text)
            except ValueError:
                reason = "the quotes are empty"
        if isinstance(target, str) and target.strip():
            prompts.append(Prompt(prompt.text, {**prompt.metadata, "ocr": target.strip()}))
        else:
            bad.setdefault(reason, []).append(line)
    if bad:
        raise ValueError(
            f"{path}: {sum(map(len, bad.values()))} of {len(numbered)} prompts have no text for OCR to look for: "
            f"{', '.join(f'{reason} (line {_few(lines)})' for reason, lines in bad.items())}. "
            'Quote it, as in a sign that says "OPEN", or give it under the key "ocr" of a .jsonl file.'
        )
    return prompts


def _few(lines: Sequence[int]) -> str:
    return ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
