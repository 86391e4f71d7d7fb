"""Threads and processes that score while the next batch is being sampled.

Shape legend: B batch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.prompts import Prompt
from recast_lightning.rewards import RewardModel

Place = Literal["inline", "threads", "processes"]


@dataclass
class Reply:
    """What came of a batch in a worker: scores [B], or an error and its traceback; and what was logged."""

    scores: NDArray[np.float32]
    records: list[logging.LogRecord]
    error: Exception | None = None
    trace: str = ""


class Workers:
    """Threads that score, and threads that each keep a worker process busy."""

    def __init__(self, threaded: dict[str, RewardModel], spawned: dict[str, RewardModel], size: int) -> None:
        self._threaded = threaded
        self._threads = ThreadPoolExecutor(size, "recast-scoring")
        self._keepers = ThreadPoolExecutor(size, "recast-scoring-process")
        self.workers = [_Worker(spawned) for _ in range(size)] if spawned else []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)

    def start(self, place: Place, name: str, images: Tensor, prompts: list[Prompt]) -> Future[Reply]:
        """Start to score images [B, 3, H, W] by one reward, in a thread or in a process."""
        if place == "threads":
            return self._threads.submit(self._score, name, images, prompts)
        return self._keepers.submit(self._send, name, images.numpy(), prompts)

    def _score(self, name: str, images: Tensor, prompts: list[Prompt]) -> Reply:
        with naming(name):
            return Reply(self._threaded[name](images, prompts).numpy(), [])

    def _send(self, name: str, images: NDArray, prompts: list[Prompt]) -> Reply:
        worker = self._idle.get()  # as many keepers as workers: never waits
        try:
            return worker.score(name, images, prompts)
        finally:
            self._idle.put(worker)

    def stop(self) -> None:
        """End the processes at once. A thread ends with the score it is at; nothing else waits for it."""
        for threads in (self._threads, self._keepers):
            threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
        self._keepers.shutdown(wait=True)  # they find their pipes broken
        for worker in self.workers:
            worker.pipe.close()


class _Worker:
    """A process that scores, behind a pipe. It ends with this process, however that ends."""

    def __init__(self, models: dict[str, RewardModel]) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would share ONNX Runtime's and OpenMP's state
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, models), daemon=True, name="recast-scoring")
        self.process.start()
        theirs.close()

    def score(self, name: str, images: NDArray, prompts: list[Prompt]) -> Reply:
        try:
            self.pipe.send((name, images, prompts))
            reply: Reply = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join(1)
            raise RuntimeError(
                f"The worker process of reward {name!r} died (exit code {self.process.exitcode}): what it said is above; "
                "-9 is often a machine out of memory. Fewer num_workers need less of it."
            ) from error
        return reply


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say which reward an error is of."""
    try:
        yield
    except UserError as error:
        raise UserError(f"Reward {name!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"Reward {name!r}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"Reward {name!r} broke with {type(error).__name__}: {error}") from error


class _Listener(logging.Handler):
    """Keeps what is logged in a worker process, to be said by its parent."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self._records.append(record)

    def take(self) -> list[logging.LogRecord]:
        records, self._records = self._records, []
        return records


def _serve(pipe: Connection, models: dict[str, RewardModel]) -> None:
    """What a worker process does: score what comes, until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    listener = _Listener()
    logging.getLogger().addHandler(listener)
    while True:
        try:
            name, images, prompts = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with naming(name):
                scores = models[name].to("cpu")(torch.from_numpy(images), prompts)
            reply = Reply(scores.numpy(), listener.take())
        except Exception as error:
            reply = Reply(np.zeros(0, np.float32), listener.take(), error, traceback.format_exc())
        pipe.send(reply)


def _follow_parent() -> None:
    """End with the parent, even in the middle of a batch: it may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
