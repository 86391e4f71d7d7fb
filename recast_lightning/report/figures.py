"""Pictures of what a run, or a stage of it, changed; each a matplotlib `Figure`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from recast_lightning.credit import Profile
from recast_lightning.report.changes import number, reward_names, value_of
from recast_lightning.report.style import canvas, panels, reward_styles


def reward_trajectories(evaluations: Sequence[dict[str, Any]], stage_starts: dict[str, int] | None = None) -> Figure:
    """Mean of every reward on the held-out prompts over rollouts, ± 1 standard error; one panel and scale a reward.

    Args:
        evaluations: Lines of evaluation.jsonl, ordered by rollout.
        stage_starts: Stage to the number of rollouts done before it; by default read off the evaluations.
    """
    names = reward_names(evaluations)
    figure, axes_of = panels(names)
    starts = stage_starts or _stage_starts(evaluations)
    rollouts = np.array([evaluation["rollout"] for evaluation in evaluations])
    for name, axes in zip(names, axes_of, strict=True):
        style = reward_styles(names)[name]
        mean = np.array([value_of(evaluation, "metrics", name) for evaluation in evaluations])
        error = np.array([value_of(evaluation, "stderr", name) for evaluation in evaluations])
        for stage, start in starts.items() if len(starts) > 1 else ():
            axes.axvline(start, color="0.6", linewidth=0.8, linestyle=":")
            label: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 7, "color": "0.4", "rotation": 90}
            axes.text(start, 0.98, f" {stage}", transform=axes.get_xaxis_transform(), **label)
        axes.axhline(mean[0], color="0.8", linewidth=0.8)
        axes.fill_between(rollouts, mean - error, mean + error, color=style.colour, alpha=0.2, linewidth=0)
        axes.plot(rollouts, mean, color=style.colour, marker=style.marker, markersize=4, linestyle=style.line)
        axes.set_title(name)
        axes.set_xlabel("rollouts")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if names:
        axes_of[0].set_ylabel("mean reward, ± 1 s.e.")
    return figure


def divergence_change(before: Profile, after: Profile) -> Figure:
    """D_0 - D_T of each reward in nats, ± 1 standard error, before and after a stage: what the policy has yet to learn.

    The title has the sums over rewards. Rewards that only one of the profiles measured are left out.

    Args:
        before: Profile of the policy that entered the stage.
        after: Profile of the policy that left the stage.

    Raises:
        ValueError: If they share no reward.
    """
    names = [name for name in before.rewards if name in after.rewards]
    if not names:
        raise ValueError(f"The profiles share no reward: {', '.join(before.rewards)} and {', '.join(after.rewards)}.")
    figure = canvas(3.2)
    axes = figure.add_subplot()
    sums, places = [], np.arange(len(names))
    styles = [reward_styles(names)[name] for name in names]
    looks: list[tuple[str, Profile, list[Any], str, float]] = [
        ("before", before, [style.pale for style in styles], "", -0.2),
        ("after", after, ["white"] * len(names), "////", 0.2),
    ]
    for _, profile, colours, hatch, shift in looks:
        totals, errors = (part[profile.rows(names)].numpy() for part in profile.totals)
        errors = np.where(np.isfinite(errors), errors, np.nan)
        bars: dict[str, Any] = {"color": colours, "edgecolor": "black", "hatch": hatch, "linewidth": 0.8}
        axes.bar(places + shift, totals, 0.38, **bars)
        axes.errorbar(places + shift, totals, errors, linestyle="", color="black", capsize=3)
        for place, total, error in zip(places + shift, totals, np.nan_to_num(errors), strict=True):
            text = number(total) if abs(total) < 0.01 else f"{total:.2f}".replace("-", "−")
            axes.annotate(
                text, (place, max(total + error, 0)), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
        sums.append(f"{totals.sum():.2f}".replace("-", "−"))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_xticks(places, names)
    axes.set_xlim(-0.6, max(len(names), 3) - 0.4)
    axes.set_ylabel("$D_0 - D_T$ (nats)")
    axes.set_title(f"ΣD {sums[0]} → {sums[1]} nats")
    keys = [
        Patch(facecolor="0.75" if not h else "white", edgecolor="black", hatch=h, label=t) for t, _, _, h, _ in looks
    ]
    axes.legend(handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handleheight=1.6)
    return figure


def _stage_starts(evaluations: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Stage to the rollouts done before it: a stage starts at the last evaluation before its own first."""
    starts: dict[str, int] = {}
    for before, after in pairwise(evaluations):
        starts.setdefault(after.get("stage", ""), before["rollout"])
    return starts
