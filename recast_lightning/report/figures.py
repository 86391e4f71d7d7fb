"""Pictures of a run, each a matplotlib `Figure` made without global state: for the report, PNG files and loggers.

A reward keeps its colour, marker and line in every picture, and markers and lines tell rewards apart in print.
"""

import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.report.changes import reward_names, value_of

_WIDTH = 8.5  # inches; 850 pixels at 100 dpi
_STYLES = (  # colours that the colour-blind tell apart (Okabe and Ito), marker, line
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", (0, (5, 1))),
    ("#56B4E9", "P", (0, (3, 1, 1, 1, 1, 1))),
    ("#000000", "X", (0, (1, 1))),
)
_RAW: dict[str, Any] = {"color": "0.6", "fillstyle": "none"}
_FIXED = ("ocr", "geneval", "clip", "pickscore", "hpsv2")  # the others take a place by a hash of their name


def gain_curves(profile: Profile) -> Figure:
    """Monotone gains dD by noise level with their standard errors, raw gains as faint markers; one panel a reward.

    Args:
        profile: T levels, clean (t = 1) on the left.
    """
    figure, panels = _panels(profile.rewards)
    levels = np.arange(1, len(profile.sigmas))
    errors = profile.gains_stderr.where(profile.gains_stderr.isfinite(), torch.nan)
    curves = (part.cpu().numpy() for part in (profile.gains, profile.monotone_gains, errors))
    rows = zip(profile.rewards, panels, *curves, strict=True)
    for name, axes, raw, gains, error in rows:
        colour, marker, line = reward_styles(profile.rewards)[name]
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.plot(levels, raw, linestyle="", marker="o", markersize=8, **_RAW, label="as measured")
        axes.errorbar(
            levels,
            gains,
            error,
            color=colour,
            marker=marker,
            linestyle=line,
            capsize=2,
            label="made monotone, ± 1 s.e.",
        )
        axes.set_title(name)
        _level_axis(axes, len(levels))
    panels[0].set_ylabel("gain ΔD (nats)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    return figure


def normalized_gains(matrix: CreditMatrix) -> Figure:
    """Shape of the gains, g~, after shrinkage: 1 is a reward's average level; a flat row lies on 1.

    Args:
        matrix: R rewards over T levels.
    """
    figure = _figure(3.2)
    axes = figure.add_subplot()
    axes.axhline(1, color="0.7", linewidth=0.8)
    levels = np.arange(1, matrix.weights.shape[1] + 1)
    for name, row in zip(matrix.rewards, matrix.normalized.numpy(), strict=True):
        colour, marker, line = reward_styles(matrix.rewards)[name]
        label = f"{name} (flat)" if (row == 1).all() else name
        axes.plot(levels, row, color=colour, marker=marker, markersize=4, linestyle=line, label=label)
    axes.set_ylabel("gain / its mean over levels")
    _level_axis(axes, len(levels))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def weight_heatmap(matrix: CreditMatrix) -> Figure:
    """Weights T W as numbers, with both margins; colour is the weight against the static one (the budget share).

    Args:
        matrix: R rewards over T levels.
    """
    weights, shares = matrix.level_weights.numpy(), matrix.weights.sum(1).numpy()
    num_rewards, num_levels = weights.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(weights / shares[:, None])  # 0 is static; a reward without budget has no ratio
    spread = np.abs(ratio[np.isfinite(ratio)]).max(initial=0.0)
    limit = float(np.clip(math.ceil(spread), 1, 2))
    colours = colormaps["RdBu_r"].with_extremes(bad="0.9")
    figure = _figure(1.4 + 0.38 * (num_rewards + 1))
    axes = figure.add_subplot()
    image = axes.imshow(ratio.clip(-limit, limit), cmap=colours, vmin=-limit, vmax=limit, aspect="auto")
    size = 9 if num_levels <= 12 else 6.5
    margin = num_levels - 0.5 + 0.05 * num_levels  # centre of the column of row sums, as wide as a tenth of the levels
    for (i, t), weight in np.ndenumerate(weights):
        colour = "white" if abs(ratio[i, t]) > 0.6 * limit else "black"
        axes.text(t, i, _short(weight, num_levels), ha="center", va="center", fontsize=size, color=colour)
    for i, share in enumerate(shares):
        axes.text(margin, i, f"{share:.3f}", ha="center", va="center", fontsize=9, weight="bold")
    for t, total in enumerate(weights.sum(0)):
        text = _short(total, num_levels)
        axes.text(t, num_rewards + 0.05, text, ha="center", va="center", fontsize=size, weight="bold")
    axes.set_xlim(-0.5, 1.1 * num_levels - 0.5)
    axes.set_ylim(num_rewards + 0.5, -0.5)
    axes.set_xticks([*range(num_levels), margin], [*map(str, range(1, num_levels + 1)), "budget\nshare"])
    axes.set_yticks(range(num_rewards + 1), [*matrix.rewards, "sum"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("noise level t (1 is the cleanest step)")
    extend = "both" if spread > limit else "neither"
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=np.arange(-limit, limit + 1), extend=extend)
    bar.ax.set_yticklabels([f"×{2.0**tick:g}" for tick in bar.get_ticks()])
    bar.set_label("against static")
    return figure


def reward_trajectories(evaluations: Sequence[dict[str, Any]], stage_starts: dict[str, int] | None = None) -> Figure:
    """Mean of every reward on the held-out prompts over rollouts, ± 1 standard error; one panel and scale a reward.

    Args:
        evaluations: Lines of evaluation.jsonl, ordered by rollout.
        stage_starts: Stage to the number of rollouts done before it; default is read off the evaluations.
    """
    names = reward_names(evaluations)
    figure, panels = _panels(names)
    starts = stage_starts or _stage_starts(evaluations)
    rollouts = np.array([evaluation["rollout"] for evaluation in evaluations])
    for name, axes in zip(names, panels, strict=True):
        colour, marker, line = reward_styles(names)[name]
        mean = np.array([value_of(evaluation, "metrics", name) for evaluation in evaluations])
        error = np.array([value_of(evaluation, "stderr", name) for evaluation in evaluations])
        for stage, start in starts.items() if len(starts) > 1 else ():
            axes.axvline(start, color="0.6", linewidth=0.8, linestyle=":")
            label: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 7, "color": "0.4", "rotation": 90}
            axes.text(start, 0.98, f" {stage}", transform=axes.get_xaxis_transform(), **label)
        axes.axhline(mean[0], color="0.8", linewidth=0.8)
        axes.fill_between(rollouts, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        axes.plot(rollouts, mean, color=colour, marker=marker, markersize=4, linestyle=line)
        axes.set_title(name)
        axes.set_xlabel("rollouts")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if names:
        panels[0].set_ylabel("mean reward, ± 1 s.e.")
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as PNG, 850 pixels wide; folders are made.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")
    return path


def reward_styles(names: Sequence[str]) -> dict[str, tuple[str, str, Any]]:
    """Colour, marker and line of each reward; by name, so that all pictures agree, and different while styles last."""
    styles: dict[str, tuple[str, str, Any]] = {}
    for name in sorted(names, key=lambda name: name not in _FIXED):
        place = _FIXED.index(name) if name in _FIXED else zlib.crc32(name.encode())
        places = [_STYLES[(place + step) % len(_STYLES)] for step in range(len(_STYLES))]
        styles[name] = next((style for style in places if style not in styles.values()), places[0])
    return styles


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(names: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with one panel a name, three in a row."""
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = _figure(0.5 + 2.2 * rows)
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(len(names))]


def _level_axis(axes: Axes, num_levels: int) -> None:
    axes.set_xlabel("noise level t (1 cleanest)")
    axes.set_xlim(0.5, num_levels + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _stage_starts(evaluations: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Each stage starts at the last evaluation before its own first."""
    starts: dict[str, int] = {}
    for before, after in pairwise(evaluations):
        starts.setdefault(after.get("stage", ""), before["rollout"])
    return starts


def _short(value: float, num_levels: int) -> str:
    """Two decimals; without the leading zero where cells are narrow."""
    text = f"{value:.2f}"
    return text if num_levels <= 12 else text.removeprefix("0")
