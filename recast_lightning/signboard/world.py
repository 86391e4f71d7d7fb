"""Signboard: 64×64 signs with coloured shapes and a short quoted word, drawn from plain English prompts.

A `Scene` is what the prompt says; `draw` is the renderer (the "strong generator" of this world) and adds what the
prompt leaves open (tint, sizes, jitter) from a seed. Every sign has a text half and a shape half.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from recast_lightning.files import content_hash
from recast_lightning.prompts.prompt import Prompt

SIZE = 64
SHAPES = ("circle", "square", "triangle", "star")
COLORS = {
    "red": (220, 40, 40),
    "orange": (245, 140, 20),
    "yellow": (240, 210, 40),
    "green": (40, 160, 70),
    "blue": (40, 90, 220),
    "purple": (140, 60, 190),
}
INK = (30, 30, 35)
LETTERS = "ACEKLNOTUV"  # no letter that starts a merge of the tokenizer: a quoted word stays letter by letter
WORDS = (
    "ACE",
    "ATE",
    "CAN",
    "CAT",
    "COT",
    "CUT",
    "EAT",
    "ELK",
    "KEN",
    "LET",
    "NET",
    "NO",
    "NUT",
    "OAK",
    "ON",
    "TEA",
    "TEN",
    "TO",
    "VAN",
    "VET",
)  # what prompts say; the base is pretrained on any letters
NUMBERS = ("a", "two", "three")
RELATIONS = ("left of", "right of", "and")
SPLITS: dict[str, range] = {"train": range(4, 20), "validation": range(2, 4), "test": range(0, 2)}

_LETTER_PITCH = 19
_SHAPE_SIZES = {1: (18, 23), 2: (16, 21), 3: (13, 16)}  # diameters in px, by number of shapes
_SCALE = 4  # supersampling


@dataclass(frozen=True)
class Group:
    """`count` shapes of one class and colour."""

    shape: str
    color: str
    count: int

    def __str__(self) -> str:
        return f"{NUMBERS[self.count - 1]} {self.color} {self.shape}{'s' if self.count > 1 else ''}"


@dataclass(frozen=True)
class Scene:
    """What a prompt says: one or two groups, how they stand to each other and to the text, and the word."""

    groups: tuple[Group, ...]
    relation: str  # "left of" | "right of" | "and"; of groups[0] to groups[1]
    shapes_above: bool
    word: str

    @property
    def text(self) -> str:
        """The prompt."""
        shapes = f" {self.relation} ".join(map(str, self.groups))
        return f'a sign with {shapes} {"above" if self.shapes_above else "below"} the text "{self.word}"'

    @property
    def tag(self) -> str:
        """GenEval's task tag."""
        if len(self.groups) == 2:
            return "color_attr" if self.relation == "and" else "position"
        return "colors" if self.groups[0].count == 1 else "counting"

    def prompt(self) -> Prompt:
        """The prompt with metadata in GenEval's schema, the OCR target and the text half as (x0, y0, x1, y1) fractions."""
        include: list[dict[str, Any]] = [
            {"class": g.shape, "count": g.count, "color": g.color} for g in reversed(self.groups)
        ]
        if self.tag == "position":
            include[1]["position"] = [self.relation, 0]
        metadata: dict[str, Any] = {"tag": self.tag, "include": include, "ocr": self.word}
        if self.tag == "counting":
            metadata["exclude"] = [{"class": self.groups[0].shape, "count": self.groups[0].count + 1}]
        metadata["text_region"] = [0.0, 0.5, 1.0, 1.0] if self.shapes_above else [0.0, 0.0, 1.0, 0.5]
        return Prompt(self.text, metadata)


def random_scene(rng: random.Random, any_letters: bool = False) -> Scene:
    """One scene; every tag is as likely as every other. The word is one of `WORDS`, or two or three letters of any kind."""
    word = "".join(rng.choice(LETTERS) for _ in range(rng.choice((2, 3)))) if any_letters else rng.choice(WORDS)
    above = rng.random() < 0.5
    kind = rng.randrange(4)
    shapes, colors = rng.sample(SHAPES, 2), rng.sample(list(COLORS), 2)
    if kind < 2:
        count = 1 if kind == 0 else rng.choice((2, 3))
        return Scene((Group(shapes[0], colors[0], count),), "and", above, word)
    counts = rng.choice(((1, 1), (1, 2), (2, 1)))
    relation = "and" if kind == 2 else rng.choice(RELATIONS[:2])
    groups = tuple(Group(s, c, n) for s, c, n in zip(shapes, colors, counts, strict=True))
    return Scene(groups, relation, above, word)


def misdescribe(scene: Scene, rng: random.Random, letters: float, colors: float, shapes: float) -> Scene:
    """A careless caption of a scene: each letter, colour and shape is drawn anew with the given probability.

    The base policy learns from such captions. It draws well but follows the prompt only in part, which leaves something for
    rewards to teach.
    """
    word = "".join(rng.choice(LETTERS) if rng.random() < letters else letter for letter in scene.word)
    groups = []
    for g in scene.groups:
        shape = rng.choice(SHAPES) if rng.random() < shapes else g.shape
        color = rng.choice(list(COLORS)) if rng.random() < colors else g.color
        groups.append(Group(shape, color, g.count))
    return Scene(tuple(groups), scene.relation, scene.shapes_above, word)


def split_of(text: str) -> str:
    """The split a prompt belongs to: a function of its text, so splits never share a prompt."""
    bucket = int(content_hash(text.encode()), 16) % 20
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def scenes(seed: int, split: str, any_letters: bool = False) -> Iterator[Scene]:
    """Endless distinct scenes of a split, the same for the same seed."""
    if split not in SPLITS:
        raise ValueError(f"Signboard split {split!r} is unknown: choose one of {', '.join(SPLITS)}.")
    rng, seen = random.Random(f"signboard/{split}/{seed}"), set()
    while True:
        scene = random_scene(rng, any_letters)
        if split_of(scene.text) == split and scene not in seen:
            seen.add(scene)
            yield scene


def make_prompts(count: int, seed: int, split: str) -> list[Prompt]:
    """The first `count` prompts of a split."""
    return [scene.prompt() for scene in itertools.islice(scenes(seed, split), count)]


def parse(prompt: Prompt) -> Scene:
    """The scene of a Signboard prompt (the inverse of `Scene.prompt`).

    Raises:
        ValueError: if the text is not a Signboard sentence.
    """
    words = prompt.text.split('"')[0].split()
    try:
        shapes = " ".join(words[3:-3])
        relation = next((r for r in RELATIONS if f" {r} " in shapes), "and")
        groups = []
        for phrase in shapes.split(f" {relation} "):
            number, color, shape = phrase.split()
            shape = shape.removesuffix("s") if shape not in SHAPES else shape
            groups.append(Group(SHAPES[SHAPES.index(shape)], color, NUMBERS.index(number) + 1))
        scene = Scene(tuple(groups), relation, words[-3] == "above", prompt.text.split('"')[1])
    except (ValueError, IndexError):
        scene = None
    known = scene is not None and scene.text == prompt.text and all(g.color in COLORS for g in scene.groups)
    if scene is None or not known:
        raise ValueError(f"{prompt.text!r} is not a Signboard prompt, so the renderer cannot draw it.")
    return scene


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans-Bold.ttf"), size)


def _polygon(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    if shape == "triangle":
        return [(x - radius, y + radius), (x + radius, y + radius), (x, y - radius)]
    points = []
    for i in range(10):
        r = radius * (1.12 if i % 2 == 0 else 0.5)
        points.append((x + r * np.sin(np.pi * i / 5), y - r * np.cos(np.pi * i / 5) + 0.06 * radius))
    return points


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: str, color: str, x: float, y: float, radius: float) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        canvas.ellipse(box, fill=COLORS[color])
    elif shape == "square":
        canvas.rectangle(box, fill=COLORS[color])
    else:
        canvas.polygon(_polygon(shape, x, y, radius), fill=COLORS[color])


def draw(scene: Scene, seed: int) -> Image.Image:
    """Draw a scene as a 64×64 RGB picture; the seed decides tint, sizes and jitter."""
    rng = random.Random(f"draw/{scene.text}/{seed}")
    tint = tuple(rng.randint(222, 252) for _ in range(3))
    image = Image.new("RGB", (SIZE * _SCALE, SIZE * _SCALE), tint)
    canvas = ImageDraw.Draw(image)
    shape_row, text_row = (SIZE / 4, 3 * SIZE / 4) if scene.shapes_above else (3 * SIZE / 4, SIZE / 4)

    groups = list(scene.groups)
    if scene.relation == "right of" or (scene.relation == "and" and rng.random() < 0.5):
        groups.reverse()
    row = [(g.shape, g.color) for g in groups for _ in range(g.count)]
    diameter = rng.uniform(*_SHAPE_SIZES[len(row)])
    for i, (shape, color) in enumerate(row):
        x = SIZE * (i + 0.5) / len(row) + rng.uniform(-1, 1)
        y = shape_row + rng.uniform(-2, 2)
        _draw_shape(canvas, shape, color, x * _SCALE, y * _SCALE, diameter * _SCALE / 2)

    left = SIZE / 2 - _LETTER_PITCH * (len(scene.word) - 1) / 2
    for i, letter in enumerate(scene.word):
        at = ((left + i * _LETTER_PITCH) * _SCALE, text_row * _SCALE)
        canvas.text(at, letter, font=_font(22 * _SCALE), fill=INK, anchor="mm")
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def draw_tensor(scene: Scene, seed: int) -> Tensor:
    """`draw` as uint8 [3, 64, 64]."""
    return torch.from_numpy(np.array(draw(scene, seed))).permute(2, 0, 1)
