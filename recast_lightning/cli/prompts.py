"""`recast prompts`: writes a set of training prompts."""

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

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


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = "Write a set of training prompts, no two alike; the same seed gives the same set."
    parser.epilog = "Example: recast prompts ocr -n 2000 --seed 1 --output ocr-train.txt"
    parser.add_argument("kind", choices=tuple(_SUFFIX), help="ocr: a .txt file; geneval and signboard: .jsonl files")
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of prompts")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides which prompts (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="to write or replace (default: standard output)")


def run(options: Namespace) -> None:
    """Write the prompts, and say on standard error what they are.

    Raises:
        ValueError: If the file cannot be of this kind, or there are not so many prompts.
        OSError: If the file cannot be written.
    """
    output: Path | None = options.output
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
    print(summary(options.kind, prompts), file=sys.stderr)
