"""The stages of a run: which rewards count for how long, under which budgets and which credit."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

_LONGEST = 200  # bytes of a name; file systems take 255 with what is added to it


@dataclass
class Stage:
    """A part of a run with its own rewards, for which W is built once.

    Args:
        name: shown in logs and used as a folder name.
        epochs: how many epochs, of one rollout each, it lasts.
        budgets: reward name → budget λ, how much it matters relative to the others.
        credit: `recast` (measured, projected), `static` (the same at every level) or `unprojected` (no column constraint).
    """

    name: str
    epochs: int
    budgets: dict[str, float]
    credit: Literal["recast", "static", "unprojected"] = "recast"


def check_stages(stages: Sequence[Stage], rewards: Collection[str]) -> None:
    """Refuse stages that cannot be trained.

    Raises:
        ValueError: naming the stage, the value, and what would be right.
    """
    if not stages:
        raise ValueError("stages is empty: a run needs at least one stage with budgets.")
    names = [stage.name for stage in stages]
    for stage in stages:
        where = f"Stage {stage.name!r}"
        if names.count(stage.name) > 1:
            raise ValueError(f"{where} comes twice: stage names must be unique.")
        if not re.fullmatch(r"\w[\w.-]*", stage.name):
            raise ValueError(
                f"{where}: a stage's name is made of letters, digits, '_', '-' and '.', and begins with neither '-' nor '.'."
            )
        if len(stage.name.encode()) > _LONGEST:
            raise ValueError(f"{where}: a stage's name has at most {_LONGEST} bytes, since a folder is called by it.")
        if stage.epochs < 1:
            raise ValueError(f"{where}: epochs must be at least 1, got {stage.epochs}.")
        for name, budget in stage.budgets.items():
            if name not in rewards:
                known = ", ".join(rewards) or "none"
                raise ValueError(f"{where}: budget for {name!r}, but there is no such reward; configured are {known}.")
            if not 0 <= budget < math.inf:
                raise ValueError(f"{where}: the budget of {name!r} must be a number ≥ 0, got {budget}.")
        if not any(stage.budgets.values()):
            raise ValueError(f"{where}: at least one budget must be above 0.")


def stage_index(stages: Sequence[Stage], rollout: int) -> int:
    """Index of the stage that a rollout belongs to; rollouts past the end belong to the last."""
    for i, stage in enumerate(stages):
        rollout -= stage.epochs
        if rollout < 0:
            return i
    return len(stages) - 1
