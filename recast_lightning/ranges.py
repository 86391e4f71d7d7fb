"""Numbers that must lie in a range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINING = {
    "rollout_batch_size": "[1, inf)", "micro_batch_size": "[1, inf)", "timestep_fraction": "(0, 1]", "beta": "(0, inf)",
    "kl_weight": "[0, inf)", "advantage_clip": "(0, inf)", "failure_share": "[0, 1]", "learning_rate": "(0, inf)",
    "weight_decay": "[0, inf)", "warmup_steps": "[0, inf)", "ema_decay": "[0, 1)", "old_rate": "[0, inf)",
    "old_flat": "[0, inf)", "old_maximum": "[0, 1)", "seed": "[0, inf)",
}  # fmt: skip


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, str]) -> None:
    """Refuse numbers out of range, and NaN everywhere.

    Args:
        values: name → number; others are left alone.
        ranges: name → interval as in mathematics, e.g. `(0, 1]` or `[1, inf)`.

    Raises:
        ValueError: naming the first number that is out of its range.
    """
    for name, interval in ranges.items():
        value = values[name]
        low, high = (float(end) for end in interval[1:-1].split(","))
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        if not (above and below):
            words = f"at least {low:g}" if interval[0] == "[" else f"above {low:g}"
            raise ValueError(f"{name} must be {words if interval.endswith('inf)') else f'in {interval}'}, got {value}.")
