"""Callbacks that do to their own process what power cuts, schedulers and full disks do."""

import importlib
import os
import resource
import signal
from typing import Any

import lightning as L


class KillAt(L.Callback):
    """Sends this process a signal just before the `call`-th call of `target`.

    Args:
        target: dotted path of a function or method.
        call: which call, from 1.
        number: of the signal; SIGKILL ends the process there and then.
        rank: the process that gets it; -1 for all.
    """

    def __init__(self, target: str, call: int, number: int = signal.SIGKILL, rank: int = -1) -> None:
        self.target, self.call, self.number, self.rank = target, call, number, rank

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.rank not in (-1, trainer.global_rank):
            return
        parts, owner = self.target.split("."), None
        for i in range(len(parts) - 1, 0, -1):
            try:
                owner = importlib.import_module(".".join(parts[:i]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[i:-1]:
            owner = getattr(owner, part)
        original, calls = getattr(owner, parts[-1]), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call:
                os.kill(os.getpid(), self.number)
            return original(*args, **kwargs)

        setattr(owner, parts[-1], counted)


class FillDisk(L.Callback):
    """Lets no file grow beyond a limit, in bytes, once the first training step is done."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))
