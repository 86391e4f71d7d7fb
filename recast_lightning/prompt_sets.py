"""Training sets of prompts, made to order: GenEval's kind, OCR's and Signboard's (`recast prompts`).

A set is put together from families of prompts. A family numbers all its prompts, so drawing numbers without replacement
gives no prompt twice, and the size of the largest set is known.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, NoReturn

from recast_lightning.cli import fail
from recast_lightning.ocr_words import KINDS, SETTINGS, STYLES
from recast_lightning.prompts import Prompt
from recast_lightning.rewards.colors import COLORS
from recast_lightning.rewards.mask2former import COCO_CLASSES
from recast_lightning.signboard import world

RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
# How often each task comes in GenEval's own 553 prompts.
TASKS = {"color_attr": 100, "position": 100, "two_object": 99, "colors": 94, "counting": 80, "single_object": 80}
_PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}
_CALLED = {"skis": "pair of skis", "scissors": "pair of scissors", "broccoli": "head of broccoli"}
_SUFFIX = {"geneval": ".jsonl", "ocr": ".txt", "signboard": ".jsonl"}


@dataclass(frozen=True)
class Family:
    """Prompts of one kind, numbered.

    Attributes:
        name: What the summary calls it.
        weight: Its share of a set, relative to the others', as far as `size` goes.
        size: How many different prompts there are.
        make: The prompt of a number below `size`.
    """

    name: str
    weight: float
    size: int
    make: Callable[[int], Prompt]


def compose(families: Sequence[Family], count: int, rng: random.Random) -> list[Prompt]:
    """Draw `count` different prompts in random order.

    Raises:
        ValueError: If there are not so many.
    """
    shares = _shares(families, count)
    pairs = zip(families, shares, strict=True)
    prompts = [family.make(number) for family, share in pairs for number in rng.sample(range(family.size), share)]
    rng.shuffle(prompts)
    return prompts


def _shares(families: Sequence[Family], count: int) -> list[int]:
    """Split `count` by weight; what a family is too small for goes to the others. Largest remainders round up."""
    _check_count(count, sum(family.size for family in families))
    shares = [family.size for family in families]
    rest, free = count, set(range(len(families)))
    while free:
        total = sum(families[i].weight for i in free)
        quotas = {i: rest * families[i].weight / total for i in free}
        full = {i for i in free if families[i].size <= quotas[i]}
        if not full:
            shares = [math.floor(quotas.get(i, share)) for i, share in enumerate(shares)]
            by_remainder = sorted(free, key=lambda i: (shares[i] - quotas[i], i))
            for i in by_remainder[: count - sum(shares)]:
                shares[i] += 1
            break
        free -= full
        rest -= sum(families[i].size for i in full)
    return shares


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"-n is {count}: expected 1 to {most}, for there are {most} different prompts of this kind.")


def geneval_families() -> list[Family]:
    """GenEval's six tasks over `COCO_CLASSES`, in its format; the tasks with colours leave out people, as it does."""
    n, things = len(COCO_CLASSES), COCO_CLASSES[1:]

    def single(number: int) -> Prompt:
        return _geneval("single_object", _phrase(COCO_CLASSES[number]), _item(COCO_CLASSES[number]))

    def two(number: int) -> Prompt:
        a, b = _two(COCO_CLASSES, number)
        return _geneval("two_object", f"{_phrase(a)} and {_phrase(b)}", _item(a), _item(b))

    def counting(number: int) -> Prompt:
        i, j = divmod(number, len(NUMBERS))
        name, amount = COCO_CLASSES[i], list(NUMBERS)[j]
        prompt = _geneval("counting", f"{NUMBERS[amount]} {_plural(name)}", {"class": name, "count": amount})
        return Prompt(prompt.text, {**prompt.metadata, "exclude": [{"class": name, "count": amount + 1}]})

    def colors(number: int) -> Prompt:
        i, j = divmod(number, len(COLORS))
        return _geneval("colors", _phrase(things[i], COLORS[j]), _item(things[i], color=COLORS[j]))

    def position(number: int) -> Prompt:
        pair, j = divmod(number, len(RELATIONS))
        (subject, reference), relation = _two(COCO_CLASSES, pair), RELATIONS[j]
        text = f"{_phrase(subject)} {relation} {_phrase(reference)}"
        return _geneval("position", text, _item(reference), _item(subject, position=[relation, 0]))

    def color_attr(number: int) -> Prompt:
        i, j = divmod(number, len(COLORS) * (len(COLORS) - 1))
        (a, b), (c, d) = _two(things, i), _two(COLORS, j)
        return _geneval("color_attr", f"{_phrase(a, c)} and {_phrase(b, d)}", _item(a, color=c), _item(b, color=d))

    shades, pairs, colored = len(COLORS), n * (n - 1), len(things)
    sizes = {
        "single_object": (single, n),
        "two_object": (two, pairs),
        "counting": (counting, n * len(NUMBERS)),
        "colors": (colors, colored * shades),
        "position": (position, pairs * len(RELATIONS)),
        "color_attr": (color_attr, colored * (colored - 1) * shades * (shades - 1)),
    }
    return [Family(tag, weight, sizes[tag][1], sizes[tag][0]) for tag, weight in TASKS.items()]


def _geneval(tag: str, what: str, *include: dict[str, Any]) -> Prompt:
    return Prompt(f"a photo of {what}", {"tag": tag, "include": list(include)})


def _item(name: str, **facts: Any) -> dict[str, Any]:
    return {"class": name, "count": 1, **facts}


def _two(names: Sequence[str], number: int) -> tuple[str, str]:
    """Two different names; `number` counts all ordered pairs."""
    i, j = divmod(number, len(names) - 1)
    return names[i], names[j + (j >= i)]


def _phrase(name: str, color: str = "") -> str:
    noun = f"{color} {_CALLED.get(name, name)}".strip()
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _plural(name: str) -> str:
    first, of, rest = _CALLED.get(name, name).partition(" of ")
    return _PLURALS.get(name, first + ("es" if first.endswith(("s", "ch", "sh")) else "s")) + of + rest


def ocr_families() -> list[Family]:
    """Sentences that quote one text each: texts and scenes of each kind, in all styles and settings."""

    def family(kind: str) -> Family:
        scenes, texts = KINDS[kind]
        frames = list(product(STYLES, scenes, SETTINGS))

        def make(number: int) -> Prompt:
            i, j = divmod(number, len(frames))
            style, scene, setting = frames[j]
            sentence = scene.format(f'"{texts[i]}"')
            return Prompt(f"{style} {sentence}, {setting}.")

        weight = 0.4 if kind == "word" else 1  # single words are rare in published sets
        return Family(kind, weight, len(texts) * len(frames), make)

    return [family(kind) for kind in KINDS]


def _signboard(count: int, seed: int) -> list[Prompt]:
    """The first prompts of Signboard's training split."""
    fit = (scene for scene in _all_scenes() if world.split_of(scene.text) == "train")
    _check_count(count, sum(1 for _ in islice(fit, count if count > 0 else None)))
    return world.make_prompts(count, seed, "train")


def _all_scenes() -> Iterator[world.Scene]:
    """Every scene that `world.random_scene` can draw."""
    kinds = [world.Group(shape, color, 1) for shape, color in product(world.SHAPES, world.COLORS)]
    relations: list[tuple[str, tuple[world.Group, ...]]] = [
        ("and", (world.Group(g.shape, g.color, n),)) for g in kinds for n in (1, 2, 3)
    ]
    for a, b in product(kinds, kinds):
        if a.shape != b.shape and a.color != b.color:
            for m, n in ((1, 1), (1, 2), (2, 1)):
                pair = (world.Group(a.shape, a.color, m), world.Group(b.shape, b.color, n))
                relations += [(relation, pair) for relation in world.RELATIONS]
    for (relation, group), above, word in product(relations, (True, False), world.WORDS):
        yield world.Scene(group, relation, above, word)


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
        return _signboard(count, seed)
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
