"""The detector of Signboard's shapes."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import scipy
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from recast_lightning.rewards.geneval.detection import Detection, Detector, Hint
from recast_lightning.signboard.world import COLORS, INK, SHAPES

Array = NDArray[np.float32]


Mask = NDArray[np.bool_]


_MIN_COSINE = 0.85  # the closest two colours, yellow and orange, are at 0.96


_PLAIN = 60  # distance from the background, in 0...255 RGB, up to which a pixel still counts as background


_MIN_ASPECT = 0.8  # shorter side over longer side; below, a region is oblong


_GRID = 24  # pixels a side at which regions and outlines are compared


_DRAWN = 240  # pixels a side at which outlines are drawn


class SignboardDetector(Detector):
    """Finds the coloured shapes of a Signboard sign: connected coloured regions that look like one of the shapes.

    A pixel belongs to the colour whose direction from the background it shares, if it lies more than half of the way
    there. Comparing directions keeps the blended edge of a shape with the shape, and that of a letter with the ink. A
    region has the colour of most of its pixels, for generated shapes are seldom of one shade. A region's certainty is
    its overlap (IoU, both stretched to a square) with the best outline, less for an oblong region. It must stand alone
    on the background, or smears of paint would pass for shapes.

    Args:
        threshold: The overlap above which a region counts as a shape. Drawn shapes reach 0.77 and more even when
            blurred and noisy; coloured letters stay below 0.77, most blobs below 0.7.
        min_area: Regions below this fraction of the image are ignored.
    """

    classes = tuple(SHAPES)
    colors = tuple(COLORS)

    def __init__(self, *, threshold: float = 0.75, min_area: float = 0.01) -> None:
        super().__init__()
        for name, value in (("threshold", threshold), ("min_area", min_area)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}: expected a fraction in [0, 1).")
        self.threshold = self.counting_threshold = threshold
        self.min_area = min_area

    def detect(self, images: Tensor, hints: Sequence[Hint] | None = None) -> list[list[Detection]]:
        """Find shapes in images [B, 3, H, W] (float32 in [0, 1]), with colours; one list an image."""
        pixels = (images.detach().float() * 255).permute(0, 2, 3, 1).cpu().numpy()
        return [self._detect_one(image) for image in pixels]

    def _detect_one(self, image: Array) -> list[Detection]:
        color_map, plain = _color_map(image)
        pixel = max(1, round(min(image.shape[:2]) / 64))
        regions, _ = scipy.ndimage.label(color_map >= 0)
        found = []
        for number, window in enumerate(scipy.ndimage.find_objects(regions), 1):
            region = regions[window] == number
            if region.sum() < self.min_area * regions.size:
                continue
            around = tuple(slice(max(0, side.start - 3 * pixel), side.stop + 3 * pixel) for side in window)
            if _stands_alone(regions[around] == number, plain[around], pixel):
                label, score = _best_shape(region)
                color = tuple(COLORS)[np.bincount(color_map[window][region]).argmax()]
                rows, columns = window
                box = (float(columns.start), float(rows.start), float(columns.stop), float(rows.stop))
                found.append(Detection(label, score, box, color))
        return found


def _color_map(image: Array) -> tuple[NDArray[np.int64], Mask]:
    """Which of COLORS each pixel of an image [H, W, 3] (0...255) has, -1 for none, and where it is plain background."""
    border = np.concatenate(
        [image[:2].reshape(-1, 3), image[-2:].reshape(-1, 3), image[:, :2].reshape(-1, 3), image[:, -2:].reshape(-1, 3)]
    )
    background = np.median(border, axis=0)
    palette = np.array([*COLORS.values(), INK], np.float32) - background
    lengths = np.linalg.norm(palette, axis=1) + 1e-6
    directions = (palette / lengths[:, None]).T
    offsets = image - background
    smooth = scipy.ndimage.uniform_filter(offsets, (3, 3, 1))  # the direction of a single pixel is noisy
    along = smooth @ directions
    winner: NDArray[np.int64] = along.argmax(2)
    cosine = along.max(2) / (np.linalg.norm(smooth, axis=2) + 1e-6)
    way = np.take_along_axis(offsets @ directions / lengths, winner[..., None], axis=2)[..., 0]
    colored = (way > 0.5) & (cosine > _MIN_COSINE) & (winner < len(COLORS))
    return np.where(colored, winner, -1), np.linalg.norm(offsets, axis=2) < _PLAIN


def _stands_alone(region: Mask, plain: Mask, pixel: int) -> bool:
    """Whether most of the ring around a region, one to three sign pixels out, is plain background."""
    ring = scipy.ndimage.binary_dilation(region, iterations=3 * pixel) & ~scipy.ndimage.binary_dilation(
        region, iterations=pixel
    )
    return bool(plain[ring].mean() > 0.7) if ring.any() else False


def _best_shape(region: Mask) -> tuple[str, float]:
    """The shape that a region [h, w], cut to its bounding box, resembles most, and how much, in [0, 1]."""
    square = _stretch(region)
    names, outlines = _outlines()
    overlap = np.minimum(square, outlines).sum((1, 2)) / np.maximum(square, outlines).sum((1, 2))
    best = int(overlap.argmax())
    oblong = min(region.shape) / max(region.shape)
    return names[best], float(overlap[best] * min(1.0, oblong / _MIN_ASPECT))


@cache
def _outlines() -> tuple[list[str], Array]:
    """Names and filled outlines [N, _GRID, _GRID] of the shapes, each sharp and with tips rounded as by blur."""
    names, outlines = [], []
    for name in SHAPES:
        canvas = Image.new("L", (2 * _DRAWN, 2 * _DRAWN))
        low, middle, high = _DRAWN / 2, _DRAWN, _DRAWN * 3 / 2
        pen = ImageDraw.Draw(canvas)
        if name == "circle":
            pen.ellipse((low, low, high, high), fill=1)
        elif name == "square":
            pen.rectangle((low, low, high, high), fill=1)
        elif name == "triangle":
            pen.polygon([(low, high), (high, high), (middle, low)], fill=1)
        else:
            radii = [_DRAWN / 2, 0.45 * _DRAWN / 2] * 5
            pen.polygon(
                [(middle + r * np.sin(np.pi * i / 5), middle - r * np.cos(np.pi * i / 5)) for i, r in enumerate(radii)],
                fill=1,
            )
        for blur in (0, 0.03, 0.06):
            mask = scipy.ndimage.gaussian_filter(np.asarray(canvas, np.float32), blur * _DRAWN) > 0.5
            names.append(name)
            outlines.append(_stretch(mask[scipy.ndimage.find_objects(mask.astype(int))[0]]))
    return names, np.stack(outlines)


def _stretch(region: Mask) -> Array:
    """A region [h, w] at [_GRID, _GRID], values in [0, 1]."""
    picture = Image.fromarray(region.astype(np.uint8) * 255).resize((_GRID, _GRID), Image.Resampling.BILINEAR)
    return np.asarray(picture, np.float32) / np.float32(255)
