"""Small pieces of HTML, with everything that comes from a run escaped."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

from matplotlib.figure import Figure


def inline(figure: Figure, alt: str) -> str:
    """A figure as wide as the page, its PNG held by the page itself."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170)
    return img(buffer, alt, "figure")


def img(png: io.BytesIO, alt: str, css: str) -> str:
    """A picture of the CSS class ``css``, its PNG held by the page itself."""
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img class="{css}" alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts; all columns but the first are set flush right."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in heading)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def paragraph(text: str, css: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{css}">{escape(text)}</p>' if css else f"<p>{escape(text)}</p>"


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 rollout``, ``2 rollouts``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def moment(rollouts: int) -> str:
    """Where in a run, by the rollouts done: ``base policy`` or ``after 2 rollouts``."""
    return "base policy" if rollouts == 0 else f"after {counted(rollouts, 'rollout')}"
