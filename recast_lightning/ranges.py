"""Numbers that must lie in a range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, str], group: str = "") -> None:
    """Refuse numbers out of range, and NaN everywhere.

    Args:
        values: name → number; others are left alone.
        ranges: name → interval as in mathematics, e.g. `(0, 1]` or `[1, inf)`.
        group: what the names belong to, for the sentence.

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
            full, allowed = (
                f"{group}.{name}" if group else name,
                words if interval.endswith("inf)") else f"in {interval}",
            )
            raise ValueError(f"{full} must be {allowed}, got {value}.")
