"""What a run says, and what ends it: errors that are the user's to mend, and signals; and lists in their sentences."""

import signal
from collections.abc import Sequence


class UserError(ValueError):
    """Raised once a run is under way; the command line shows its sentence alone and exits with 2."""


class RunWarning(UserWarning):
    """Something in a run that is worth a look; no filter, as of `python -W error`, makes the run stop for it."""


class Interrupted(Exception):
    """A signal asked the run to stop, and everything up to here is in the last checkpoint.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def few(items: Sequence[object], most: int = 3) -> str:
    """The first items for a sentence, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown
