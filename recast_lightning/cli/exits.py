"""How a command ends: with one sentence and exit code 2 where the user has something to mend, or as a signal asks."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from recast_lightning.errors import Interrupted, UserError

_SIGINT_CODE = 128 + signal.SIGINT
_CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)


def fail(message: str) -> NoReturn:
    """Leave with one sentence and exit code 2."""
    print(f"recast: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def speak_plainly() -> None:
    """Let no character end a run that the terminal cannot show: its code is written in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C where nothing takes note of it, as while models load, ends with a sentence, as the signal asks.

    Lightning makes exit code 1 of it, and an import that it breaks off may end in any error.
    """
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__context__
        if cause is None:
            raise
        _say_interrupted()
        sys.exit(_SIGINT_CODE)


@contextmanager
def importing() -> Iterator[None]:
    """While libraries are imported, some of which swallow KeyboardInterrupt, Ctrl-C ends the process at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    _say_interrupted()
    os._exit(_SIGINT_CODE)


def _say_interrupted() -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sentence = "recast: stopped by SIGINT; fit with --ckpt_path last goes on from its last checkpoint."
        print(sentence, file=sys.stderr, flush=True)


@contextmanager
def configuring() -> Iterator[None]:
    """While arguments and files are read and checked: what is wrong with them is the user's to mend."""
    try:
        yield
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        fail(str(error) if error.errno is None else f"{error.filename or 'standard output'}: {error.strerror}.")


@contextmanager
def running() -> Iterator[None]:
    """While a run is under way: a `UserError` is a sentence, a full disk too, and a signal ends as signals do."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        where = f" to {error.filename!r}" if error.filename else ""
        fail(
            f"Could not write{where}: {error.strerror}. Checkpoints are whole: mend it, then go on with --ckpt_path last."
        )
    except Interrupted as stop:
        _leave(stop)


def _leave(stop: Interrupted) -> None:
    """End as a process does that a signal ended, after asking SLURM for another turn if that was its warning."""
    from lightning.pytorch.utilities import rank_zero_only

    from recast_lightning.checkpointing.interruption import requeue

    @rank_zero_only
    def leave() -> None:
        print(f"recast: stopped by {stop}; the same command with --ckpt_path last goes on from here.", file=sys.stderr)
        if stop.number == signal.SIGUSR1:
            print(f"recast: {requeue()}", file=sys.stderr)
        sys.exit(128 + stop.number)

    leave()
