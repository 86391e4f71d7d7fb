"""Prompts of GenEval's six tasks (Ghosh et al. 2023, arXiv 2310.11513)."""

from collections.abc import Sequence
from typing import Any

from recast_lightning.prompts.geneval_names import COCO_CLASSES, COLORS
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.prompts.sets import Family

RELATIONS = ("left of", "right of", "above", "below")


NUMBERS = {2: "two", 3: "three", 4: "four"}


# How often each task comes in GenEval's own 553 prompts.
TASKS = {"color_attr": 100, "position": 100, "two_object": 99, "colors": 94, "counting": 80, "single_object": 80}


_PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}


_CALLED = {"skis": "pair of skis", "scissors": "pair of scissors", "broccoli": "head of broccoli"}


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
