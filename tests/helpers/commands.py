"""Runs `recast fit` in processes of its own, as a user or a scheduler does."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    """`recast` with arguments, in a session of its own, ready to be signalled. No warning on its way may end it."""
    everything = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "recast_lightning", *arguments],
        env=everything, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, timeout: float = 300) -> tuple[int, str, str]:
    """Exit code, output and errors; whatever it left behind is ended, too."""
    try:
        out, errors = process.communicate(timeout=timeout)
    finally:
        kill(process)
    return process.returncode, out, errors


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def with_killer(file: Path, target: str, call: int, number: int = signal.SIGKILL, rank: int = -1) -> Path:
    """A copy of a configuration whose run gets a signal just before the `call`-th call of `target`."""
    return with_callback(file, "helpers.killer.KillAt", target=target, call=call, number=int(number), rank=rank)


def with_callback(file: Path, class_path: str, **options: Any) -> Path:
    """A copy of a configuration with one callback more, which comes first."""
    text = yaml.safe_load(file.read_text())
    text["trainer"]["callbacks"].insert(0, {"class_path": class_path, "init_args": options})
    other = file.with_name("with-callback.yaml")
    other.write_text(yaml.safe_dump(text))
    return other
