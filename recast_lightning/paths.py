"""Where weights are: embedded (`signboard:NAME`), a local path, or a hub id; and `~` in paths of all kinds."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recast_lightning.errors import UserError

EMBEDDED = Path(__file__).parent / "signboard" / "weights"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def expand_home(value: Any) -> Any:
    """Options with the user's folder in place of a leading `~`, wherever they hold a text or a path.

    Args:
        value: an option, or a namespace, mapping or list of options, to any depth; a namespace is changed in place.
    """
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, Path):
        return value.expanduser()
    if isinstance(value, dict):
        return {name: expand_home(item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    if isinstance(value, Namespace):
        vars(value).update(expand_home(vars(value)))
    return value


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


@contextmanager
def reading(what: str, path: str) -> Iterator[None]:
    """Turns what libraries raise for weights that are not there into one sentence with what to do.

    Args:
        what: Begins the sentence, e.g. ``clip found no tokenizer``.
        path: The local path or hub id that is read inside.

    Raises:
        UserError: If it is not there, the hub cannot be reached, or the hub does not give it to this user.
    """
    from huggingface_hub import errors

    try:
        yield
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise UserError(f'{what} in "{path}", neither here nor on the hub: {_advice(path, error)}') from error


def _advice(path: str, error: BaseException) -> str:
    """Why, and what to do. Libraries wrap the hub's errors, so the whole chain of causes counts."""
    from huggingface_hub import errors

    def caused_by(*kinds: type[BaseException]) -> bool:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, kinds):
            cause = cause.__cause__ or cause.__context__
        return cause is not None

    no_answer = caused_by(errors.HTTPError) and not caused_by(errors.HfHubHTTPError)  # type: ignore[attr-defined]
    reason = " ".join(str(error).split())
    if Path(path).exists():
        return reason
    log_in = "log in by `hf auth login` or HF_TOKEN"
    if caused_by(errors.GatedRepoError):
        return f"accept its licence on https://huggingface.co/{path} and {log_in}, or give a local folder."
    if caused_by(errors.RepositoryNotFoundError):
        return f"check the name and, if it is private, {log_in}, or give a local folder."
    if caused_by(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) or no_answer:
        offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        return f"{why} and the cache lacks it; run `hf download {path}` with a network, or give a local folder."
    return reason
