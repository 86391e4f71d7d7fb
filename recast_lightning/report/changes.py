"""How far each reward moved between the first and the last evaluation of a run, with the standard error of that."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Change:
    """One reward, before and after.

    Attributes:
        reward: Name of the reward.
        base: Mean at the first evaluation.
        final: Mean at the last evaluation.
        stderr: Standard error of final - base: over prompts where both evaluations keep their scores, else as if the
            evaluations were independent.
    """

    reward: str
    base: float
    final: float
    stderr: float

    @property
    def delta(self) -> float:
        """Final minus base."""
        return self.final - self.base

    @property
    def verb(self) -> str:
        """``rose``, ``fell``, ``did not change`` or ``cannot be compared``."""
        if not math.isfinite(self.delta):
            return "cannot be compared"
        return "rose" if self.delta > 0 else "fell" if self.delta < 0 else "did not change"

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than two standard errors."""
        return abs(self.delta) > 2 * self.stderr


def changes(evaluations: Sequence[dict[str, Any]]) -> list[Change]:
    """The change of every reward from the first evaluation to the last; empty if there are fewer than two.

    Evaluations with other settings than the last one's (rewards, prompts, sampler) are left out.

    Args:
        evaluations: Lines of evaluation.jsonl, ordered by rollout.
    """
    settings = evaluations[-1].get("settings") if evaluations else None
    evaluations = [evaluation for evaluation in evaluations if evaluation.get("settings", settings) == settings]
    if len(evaluations) < 2:
        return []
    base, final = evaluations[0], evaluations[-1]
    return [
        Change(
            reward=name,
            base=value_of(base, "metrics", name),
            final=value_of(final, "metrics", name),
            stderr=_stderr(base, final, name),
        )
        for name in reward_names(evaluations)
    ]


def _stderr(base: dict[str, Any], final: dict[str, Any], name: str) -> float:
    """Standard error of a reward's change, see `Change.stderr`."""
    before, after = (evaluation.get("scores", {}).get(name, []) for evaluation in (base, final))
    if len(before) == len(after):
        paired = [b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
        if len(paired) > 1:
            return statistics.stdev(paired) / math.sqrt(len(paired))
    return math.hypot(value_of(base, "stderr", name), value_of(final, "stderr", name))


def reward_names(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Every reward that was evaluated, in order of appearance."""
    return list(dict.fromkeys(name for evaluation in evaluations for name in evaluation["metrics"]))


def value_of(evaluation: dict[str, Any], what: str, reward: str) -> float:
    """``evaluation[what][reward]`` as a float; NaN if it is missing or null."""
    value = evaluation.get(what, {}).get(reward)
    return math.nan if value is None else float(value)


def number(value: float, sign: str = "") -> str:
    """A number to read: three decimals, or two digits if it is tiny; ``sign="+"`` also marks a rise."""
    if not math.isfinite(value):
        return "–"
    digits = ".3f" if abs(value) >= 0.01 or value == 0 else ".2g"
    return f"{value:{sign}{digits}}".replace("-", "−")


def summary_table(evaluations: Sequence[dict[str, Any]]) -> Table:
    """The changes of a run for the console; with a single evaluation, its values.

    Args:
        evaluations: Lines of evaluation.jsonl, ordered by rollout.
    """
    table = Table("reward", title="Held-out prompts")
    start = "first" if evaluations and evaluations[0].get("rollout") else "base"
    for heading in (start, "final", "change ± s.e."):
        table.add_column(heading, justify="right")
    moved = changes(evaluations)
    for change in moved:
        colour = {"rose": "green", "fell": "red"}.get(change.verb, "dim") if change.clear else "dim"
        difference = f"[{colour}]{number(change.delta, '+')} ± {number(change.stderr)}[/]"
        table.add_row(change.reward, number(change.base), number(change.final), difference)
    for name in reward_names(evaluations) if not moved else []:
        table.add_row(name, number(value_of(evaluations[0], "metrics", name)), "–", "–")
    return table
