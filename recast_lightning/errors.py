"""Errors that are the user's to mend."""


class UserError(ValueError):
    """Raised once a run is under way; the command line shows its sentence alone and exits with 2."""
