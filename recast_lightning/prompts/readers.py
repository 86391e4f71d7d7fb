"""Reads prompts from the two file formats."""

import json
from collections.abc import Sequence
from pathlib import Path

from recast_lightning.errors import few
from recast_lightning.prompts.prompt import Prompt, find_ocr_target


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
    try:
        if "\\ud" in line.lower():  # only so can half of a character come in
            json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
        raise ValueError(
            f"{where}: {half} is half of a character (a surrogate without its pair): mend the text."
        ) from error
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
            f"{', '.join(f'{reason} (line {few(lines, 5)})' for reason, lines in bad.items())}. "
            'Quote it, as in a sign that says "OPEN", or give it under the key "ocr" of a .jsonl file.'
        )
    return prompts
