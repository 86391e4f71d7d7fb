"""Pictures drawn with PIL, independently of the renderer of Signboard."""

import math

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from recast_lightning.signboard.world import COLORS, INK

Shape = tuple[str, str, float, float, float]  # class, colour, centre x, centre y, diameter; pixels of a 64-pixel sign
SCALE = 2


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB picture as uint8 [3, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def noise(number: int, height: int, width: int) -> Tensor:
    """Pictures [number, 3, height, width] in [0, 1], in 8 bits a channel."""
    return torch.randint(256, (number, 3, height, width), generator=torch.Generator().manual_seed(0)) / 255


def by_pillow(image: Tensor, size: int) -> Tensor:
    """The square [1, 3, size, size] in [0, 1] that torchvision's Resize (bicubic) and CenterCrop cut out of a picture."""
    short = min(image.shape[1:])
    high, wide = (int(size * side / short) for side in image.shape[1:])
    scaled = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((wide, high), Image.Resampling.BICUBIC)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return to_tensor(scaled.crop((left, top, left + size, top + size)))[None] / 255


def text_picture(*lines: str, size: tuple[int, int] = (256, 96), height: int = 40) -> Tensor:
    """Black lines of text on white, uint8 [3, H, W]."""
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        at = (size[0] / 2, size[1] * (i + 0.5) / len(lines))
        pen.text(at, line, font=ImageFont.load_default(height), fill="black", anchor="mm")
    return to_tensor(image)


def sign(
    shapes: list[Shape], word: str = "", *, background=(240, 228, 218), side: int = 64, text_y: float = 48
) -> Tensor:
    """Shapes and a word, uint8 [3, side, side]; drawn at twice the size and reduced."""
    unit = side * SCALE / 64
    image = Image.new("RGB", (side * SCALE, side * SCALE), background)
    pen = ImageDraw.Draw(image)
    for shape, color, x, y, diameter in shapes:
        x, y, r = x * unit, y * unit, diameter * unit / 2
        if shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=COLORS[color])
        elif shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=COLORS[color])
        elif shape == "triangle":
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=COLORS[color])
        else:
            spikes = [(r if i % 2 == 0 else 0.45 * r, math.pi * i / 5) for i in range(10)]
            pen.polygon([(x + q * math.sin(a), y - q * math.cos(a)) for q, a in spikes], fill=COLORS[color])
    if word:
        font = ImageFont.load_default(18 * unit)
        pen.text(
            (32 * unit, text_y * unit), word, font=font, fill=INK, anchor="mm", stroke_width=unit / 2, stroke_fill=INK
        )
    return to_tensor(image.resize((side, side), Image.Resampling.BOX))
