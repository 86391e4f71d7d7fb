"""Pictures of a profile and of a credit matrix, each a matplotlib `Figure`.

Shape legend: R rewards, T noise levels; t = 1, the cleanest, is on the left.
"""

import math
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from recast_lightning.credit import CreditMatrix, Profile
from recast_lightning.credit import normalized_gains as shape_of
from recast_lightning.report.style import canvas, level_axis, panels, reward_styles

_RAW: dict[str, Any] = {"color": "0.55", "fillstyle": "none", "markersize": 8}
_BAND = 0.2  # opacity
_ABOVE = 0.1  # log2 of a weight to the static one from which it counts as above
_WIDE = 12  # levels up to which cells hold two decimals and an error


def gain_curves(profile: Profile) -> Figure:
    """Monotone gains dD by noise level in a band of ± 1 standard error; one panel a reward.

    Measured levels have markers (filled: made monotone; grey rings: as measured). Levels without one are interpolated.

    Args:
        profile: Gains [R, T].
    """
    figure, axes_of = panels(profile.rewards)
    levels, measured = np.arange(1, len(profile.sigmas)), np.array(profile.levels) - 1
    curves = (part.numpy() for part in (profile.gains, profile.monotone_gains, profile.gains_stderr))
    styles, flat = reward_styles(profile.rewards), profile.flat
    for name, axes, raw, gains, error in zip(profile.rewards, axes_of, *curves, strict=True):
        style = styles[name]
        axes.axhline(0, color="0.7", linewidth=0.8)
        _band(axes, levels, gains, error, style.colour)
        axes.plot(levels[measured], raw[measured], linestyle="", marker="o", **_RAW, label="as measured")
        label = "made monotone, band ± 1 s.e." + ("" if len(measured) == len(levels) else "; no marker: interpolated")
        line: dict[str, Any] = {
            "color": style.colour,
            "linestyle": style.line,
            "marker": style.marker,
            "markersize": 4.5,
        }
        axes.plot(levels, gains, **line, markevery=measured.tolist(), label=label)
        axes.set_title(f"{name} (flat)" if name in flat else name)
        level_axis(axes, len(levels))
    axes_of[0].set_ylabel("gain ΔD (nats)")
    handles, labels = axes_of[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def normalized_gains(matrix: CreditMatrix) -> Figure:
    """Shape of the gains, g~, after shrinkage, in bands of ± 1 standard error: 1 is a reward's average level.

    Args:
        matrix: g~ [R, T].
    """
    figure = canvas(3.2)
    axes = figure.add_subplot()
    axes.axhline(1, color="0.7", linewidth=0.8)
    levels = np.arange(1, matrix.weights.shape[1] + 1)
    errors = np.full(matrix.weights.shape, np.nan)
    if matrix.normalized_stderr is not None:
        errors = matrix.normalized_stderr.numpy()
    for name, row, error in zip(matrix.rewards, matrix.normalized.numpy(), errors, strict=True):
        style = reward_styles(matrix.rewards)[name]
        _band(axes, levels, row, error, style.colour)
        label = f"{name} (flat)" if (row == 1).all() else name
        axes.plot(levels, row, color=style.colour, marker=style.marker, markersize=5, linestyle=style.line, label=label)
    axes.set_ylabel("gain / its mean over levels")
    level_axis(axes, len(levels))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=3.5)
    return figure


def weight_heatmap(matrix: CreditMatrix) -> Figure:
    """Weights T W as numbers, with both margins; colour is the weight against the static one (the budget share).

    Weights above the static one are bold, for print. Up to 12 levels, the small number below a weight is its standard
    error, where it is known.

    Args:
        matrix: W [R, T].
    """
    weights, shares = matrix.level_weights.numpy(), matrix.weights.sum(1).numpy()
    num_rewards, num_levels = weights.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(weights / shares[:, None])  # 0 is static; a reward without budget has no ratio
    spread = np.abs(ratio[np.isfinite(ratio)]).max(initial=0.0)
    limit = float(np.clip(math.ceil(spread), 1, 2))
    colours = colormaps["RdBu_r"].with_extremes(bad="0.9")
    errors = _weight_errors(matrix)
    figure = canvas(1.4 + (0.38 if errors is None else 0.48) * (num_rewards + 1))
    axes = figure.add_subplot()
    image = axes.imshow(ratio.clip(-limit, limit), cmap=colours, vmin=-limit, vmax=limit, aspect="auto")
    _cells(axes, weights, errors, ratio, limit)
    margin = num_levels - 0.5 + 0.05 * num_levels  # centre of the column of row sums, as wide as a tenth of the levels
    for i, share in enumerate(shares):
        axes.text(margin, i, f"{share:.3f}", ha="center", va="center", fontsize=9, weight="bold")
    for t, total in enumerate(weights.sum(0)):
        _number(axes, t, num_rewards + 0.05, total, num_levels, weight="bold")
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


def demand(profile: Profile, credit: CreditMatrix | None = None) -> Figure:
    """Aggregate demand: the normalised gains g~ of all rewards by noise level, each times its budget share, stacked.

    At 1 everywhere, every level is asked for as much as the columns of W grant it. The title has the largest over the
    smallest for t = 2 ... T: the gain at t = 1, in grey, also holds the gap between generator and policy.

    Args:
        profile: Measured gains [R, T]; made monotone, all rewards with equal budgets.
        credit: If given, its g~ (after shrinkage) and its budgets [R, T] instead, of rewards that the profile has.
    """
    if credit is None:
        rewards, shares = profile.rewards, np.full(len(profile.rewards), 1 / len(profile.rewards))
        gains = shape_of(profile.monotone_gains).numpy()
    else:
        profile.rows(credit.rewards)
        rewards, shares, gains = credit.rewards, credit.weights.sum(1).numpy(), credit.normalized.numpy()
    parts = shares[:, None] * gains
    levels, bottom = np.arange(1, parts.shape[1] + 1), np.zeros(parts.shape[1])
    figure = canvas(3.4)
    axes = figure.add_subplot()
    handles: list[Any] = []
    for name, part in zip(rewards, parts, strict=True):
        if not part.any():
            continue  # no budget
        style = reward_styles(rewards)[name]
        shades = [(0.9, 0.9, 0.9), *[style.pale] * (len(levels) - 1)]
        edges = ["0.6", *["black"] * (len(levels) - 1)]
        axes.bar(levels, part, 0.8, bottom, color=shades, edgecolor=edges, hatch=style.hatch, linewidth=0.7)
        handles.append(Patch(facecolor=style.pale, edgecolor="black", hatch=style.hatch, linewidth=0.7, label=name))
        bottom += part
    handles.append(axes.axhline(1, color="black", linestyle="--", linewidth=1.2, label="flat (static)"))
    axes.set_title(_demand_title(bottom))
    axes.set_ylabel("Σ share × gain / its mean")
    level_axis(axes, len(levels))
    axes.legend(handles=handles[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handleheight=1.6)
    return figure


def _demand_title(total: NDArray[np.float64]) -> str:
    if len(total) < 3 or total[1:].min() <= 0:
        return "Aggregate demand"
    return f"Aggregate demand: largest / smallest {total[1:].max() / total[1:].min():.2f} over t = 2 … {len(total)}"


def _band(axes: Axes, x: NDArray[Any], middle: NDArray[Any], error: NDArray[Any], colour: str) -> None:
    """A band of ± 1 error, thinly outlined; nothing where the error is not finite."""
    error = np.where(np.isfinite(error), error, np.nan)
    axes.fill_between(x, middle - error, middle + error, facecolor=colour, alpha=_BAND, linewidth=0)
    for edge in (middle - error, middle + error):
        axes.plot(x, edge, color=colour, linewidth=0.5, alpha=0.6)


def _weight_errors(matrix: CreditMatrix) -> NDArray[np.float64] | None:
    """Standard errors of T W if there are any to show, [R, T]."""
    num_levels = matrix.weights.shape[1]
    if matrix.weights_stderr is None or num_levels > _WIDE or not matrix.weights_stderr.any():
        return None
    errors: NDArray[np.float64] = num_levels * matrix.weights_stderr.numpy()
    return errors


def _cells(
    axes: Axes, weights: NDArray[Any], errors: NDArray[Any] | None, ratio: NDArray[np.float64], limit: float
) -> None:
    """The numbers of the heat map, then the errors below them; ``ratio`` is log2 of weight to static, [R, T]."""
    num_levels = weights.shape[1]
    colours = np.where(np.abs(ratio) > 0.6 * limit, "white", "black")
    for (i, t), weight in np.ndenumerate(weights):
        bold = "bold" if ratio[i, t] > _ABOVE else "normal"
        y = i - (0 if errors is None else 0.14)
        _number(axes, t, y, weight, num_levels, color=colours[i, t], weight=bold)
    if errors is None:
        return
    for (i, t), error in np.ndenumerate(errors):
        if error > 0:
            small = "±" + f"{error:.2f}".removeprefix("0")
            axes.text(t, i + 0.27, small, ha="center", va="center", fontsize=6.5, color=colours[i, t])


def _number(axes: Axes, x: float, y: float, value: float, num_levels: int, **kwargs: Any) -> None:
    """Two decimals; smaller and without the leading zero where cells are narrow."""
    wide = num_levels <= _WIDE
    text = f"{value:.2f}" if wide else f"{value:.2f}".removeprefix("0")
    axes.text(x, y, text, ha="center", va="center", fontsize=9 if wide else 6.5, **kwargs)
