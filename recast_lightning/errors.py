"""What ends a run: errors that are the user's to mend, and signals."""

import signal


class UserError(ValueError):
    """Raised once a run is under way; the command line shows its sentence alone and exits with 2."""


class Interrupted(Exception):
    """A signal asked the run to stop, and everything up to here is in the last checkpoint.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
