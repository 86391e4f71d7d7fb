"""`recast prompts`: writes a set of training prompts."""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from recast_lightning.cli.entry import fail
from recast_lightning.prompts.geneval_set import geneval_families
from recast_lightning.prompts.ocr_set import ocr_families
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.prompts.sets import compose
from recast_lightning.signboard.prompt_set import first_prompts

_SUFFIX = {"geneval": ".jsonl", "ocr": ".txt", "signboard": ".jsonl"}


def make_set(kind: str, count: int, seed: int) -> list[Prompt]:
    """`count` different training prompts, the same for the same seed.

    Args:
        kind: ``geneval``, ``ocr`` or ``signboard``.
        count: How many.
        seed: Decides which, and their order.

    Raises:
        ValueError: If there are not so many.
    """
    if kind == "signboard":
        return first_prompts(count, seed)
    families = geneval_families() if kind == "geneval" else ocr_families()
    return compose(families, count, random.Random(f"prompts/{kind}/{seed}"))


def as_line(prompt: Prompt) -> str:
    """A prompt as :func:`read_prompts` reads it: a JSON object if it has metadata, else its text."""
    if not prompt.metadata:
        return prompt.text
    order = {key: prompt.metadata[key] for key in ("tag", "include", "exclude") if key in prompt.metadata}
    return json.dumps({**order, **prompt.metadata, "prompt": prompt.text}, ensure_ascii=False)


def summary(kind: str, prompts: Sequence[Prompt]) -> str:
    """How many prompts there are of each task, and which tasks are used up."""
    found = Counter(prompt.metadata["tag"] for prompt in prompts if "tag" in prompt.metadata)
    text = f"{len(prompts)} {kind} prompts"
    if found:
        text += ": " + ", ".join(f"{count} {tag}" for tag, count in found.most_common())
    if kind == "geneval":
        spent = [family.name for family in geneval_families() if found[family.name] == family.size]
        text += f"; there are no more of {', '.join(spent)}" if spent else ""
    return f"{text}."


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are the sentence alone."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def main(arguments: Sequence[str]) -> None:
    """Runs `recast prompts`; what is wrong with the arguments or the file leaves in one sentence, with exit code 2."""
    parser = _Parser(
        prog="recast prompts",
        description="Write a set of training prompts, no two alike; the same seed gives the same set.",
        epilog="Example: recast prompts ocr -n 2000 --seed 1 --output ocr-train.txt",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=tuple(_SUFFIX), help="ocr: a .txt file; geneval and signboard: .jsonl files")
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of prompts")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides which prompts (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="to write or replace (default: standard output)")
    options = parser.parse_args(list(arguments))
    output: Path | None = options.output
    try:
        if output is not None and output.suffix != _SUFFIX[options.kind]:
            raise ValueError(f"The output {output} must be a {_SUFFIX[options.kind]} file.")
        if output is not None and not output.parent.is_dir():
            raise ValueError(f"The folder {output.parent} does not exist.")
        prompts = make_set(options.kind, options.n, options.seed)
        text = "".join(f"{as_line(prompt)}\n" for prompt in prompts)
        if output is None:
            sys.stdout.write(text)
        else:
            output.write_text(text, encoding="utf-8", newline="\n")
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or 'standard output'}: {error.strerror}.")
    print(summary(options.kind, prompts), file=sys.stderr)
