"""Where weights are: embedded (`signboard:NAME`), a local path, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

EMBEDDED = Path(__file__).parent / "signboard" / "weights"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def resolve(path: str, what: str = "weights") -> str:
    """A local path or hub id for `path`.

    Raises:
        ValueError: if an embedded name is unknown or a local path does not exist.
    """
    if path.startswith("signboard:"):
        folder = EMBEDDED / path.removeprefix("signboard:")
        if not folder.is_dir():
            known = ", ".join(f"signboard:{p.name}" for p in sorted(EMBEDDED.iterdir()) if p.is_dir())
            raise ValueError(f"The {what} path {path!r} is not embedded: known are {known}.")
        return str(folder)
    if Path(path).exists() or _HUB_ID.match(path):
        return path
    raise ValueError(
        f"The {what} path {path!r} does not exist: give a local path, a hub id owner/name or signboard:NAME."
    )
