"""The look of all pictures: one palette, and canvases of report width, made without matplotlib's global state.

A reward keeps its colour, marker, line and hatching in every picture; the last three tell rewards apart in print.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH = 8.5  # inches; 850 pixels at 100 dpi


class Style(NamedTuple):
    """How a reward is drawn.

    Attributes:
        colour: Colour, as a hex code.
        marker: Marker at points.
        line: Line style between points.
        hatch: Hatching of bars.
    """

    colour: str
    marker: str
    line: Any
    hatch: str

    @property
    def pale(self) -> tuple[float, ...]:
        """The colour for areas, light enough for a black hatching."""
        return tuple(0.5 + 0.5 * part for part in to_rgb(self.colour))


_STYLES = (  # colours that the colour-blind tell apart (Okabe and Ito)
    Style("#0072B2", "o", "-", "///"),
    Style("#D55E00", "s", "--", "..."),
    Style("#009E73", "^", "-.", "\\\\\\"),
    Style("#CC79A7", "D", ":", "xxx"),
    Style("#E69F00", "v", (0, (5, 1)), ""),
    Style("#56B4E9", "P", (0, (3, 1, 1, 1, 1, 1)), "---"),
    Style("#000000", "X", (0, (1, 1)), "||"),
)
_FIXED = ("ocr", "geneval", "clip", "pickscore", "hpsv2")  # the others take a place by a hash of their name


def reward_styles(names: Sequence[str]) -> dict[str, Style]:
    """Style of each reward: chosen by name, so that all pictures agree, and distinct while there are enough styles."""
    styles: dict[str, Style] = {}
    for name in sorted(names, key=lambda name: name not in _FIXED):
        place = _FIXED.index(name) if name in _FIXED else zlib.crc32(name.encode())
        places = [_STYLES[(place + step) % len(_STYLES)] for step in range(len(_STYLES))]
        styles[name] = next((style for style in places if style not in styles.values()), places[0])
    return styles


def canvas(height: float) -> Figure:
    """An empty figure of report width, ``height`` inches high."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(names: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with one panel a name, three in a row."""
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = canvas(0.5 + 2.2 * rows)
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(len(names))]


def level_axis(axes: Axes, num_levels: int) -> None:
    """Noise levels 1 to T along x."""
    axes.set_xlabel("noise level t (1 cleanest)")
    axes.set_xlim(0.5, num_levels + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as PNG, 850 pixels wide; folders are made.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")
    return path
