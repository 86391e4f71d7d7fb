"""Scores images, slow rewards in the background while the next batch is being sampled.

A reward says by its class attribute `workers` where it runs: ``inline`` (at once, on the device), in ``threads`` (it
waits for somebody else, e.g. a server) or in ``processes`` (it works on the CPU for itself, e.g. OCR).

Shape legend: B batch, R rewards.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast_lightning.errors import UserError
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import RewardModel

Place = Literal["inline", "threads", "processes"]


def place_of(name: str, model: RewardModel) -> Place:
    """Where a reward runs when there are workers.

    Raises:
        ValueError: If it names no place, or belongs into a process and cannot travel there.
    """
    place: Place = model.workers
    if place not in get_args(Place):
        raise ValueError(f"Reward {name!r} has workers {place!r}: expected one of {', '.join(get_args(Place))}.")
    if place == "processes":
        try:
            pickle.dumps(model)
        except Exception as error:
            raise ValueError(
                f"Reward {name!r} runs in a process of its own, but cannot be pickled: {error}. Keep in its attributes "
                "plain values only and read everything else in _load, or set num_workers to 0."
            ) from error
    return place


class ScoringPool:
    """Scores batches of images by all rewards, in order, whatever finishes first; scores are those of inline scoring.

    Workers start with the first batch that needs them and stay until `close`. At most two batches a worker wait or are
    being scored; `submit` waits for the oldest beyond that, so that images do not pile up in memory.

    Args:
        models: Name → reward model.
        num_workers: Worker processes, and as many threads; 0 scores everything inline.
        device: Where inline rewards score; default where the images are.
    """

    def __init__(
        self, models: dict[str, RewardModel], num_workers: int = 0, device: torch.device | None = None
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, got {num_workers}.")
        self.models, self.num_workers, self.device = models, num_workers, device
        self.places = {name: place_of(name, model) if num_workers else "inline" for name, model in models.items()}
        self._pending: deque[PendingScores] = deque()
        self._crew: _Crew | None = None
        self._stop: Callable[[], object] = lambda: None
        self._said: set[tuple[str, str]] = set()

    def submit(self, images: Tensor, prompts: Sequence[Prompt], names: Sequence[str]) -> PendingScores:
        """Start to score images [B, 3, H, W] in [0, 1] by the named rewards; the inline ones are done on return.

        Raises:
            RuntimeError: Naming the reward, if this or an earlier batch broke it or its worker process (`ValueError`
                for input that it refuses).
        """
        while self._pending and (self._pending[0].done() or len(self._pending) >= 2 * self.num_workers):
            self._pending.popleft().result()
        batch = PendingScores(self, names)
        away = [name for name in dict.fromkeys(names) if self.places[name] != "inline"]
        if away:
            if self._crew is None:
                self._crew = self._hire()
            pixels = (images if images.dtype == torch.uint8 else images.float()).detach().cpu()
            for name in away:
                batch.jobs[name] = self._crew.start(self.places[name], name, pixels, list(prompts))
            self._pending.append(batch)
        for name in names:
            if name not in batch.columns and name not in batch.jobs:
                with _named(name):
                    batch.columns[name] = self.models[name].to(self.device or images.device)(images, prompts)
        return batch

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the workers if what is done inside ends well, and stop them if it does not."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop what is waiting and end all workers; the next `submit` starts new ones."""
        self._pending.clear()
        self._crew = None
        self._stop()

    def _hire(self) -> _Crew:
        kinds = {place: {n: m for n, m in self.models.items() if self.places[n] == place} for place in get_args(Place)}
        for name, model in kinds["threads"].items():
            with _named(name):
                model.load()  # once, before several threads would
        crew = _Crew(kinds["threads"], kinds["processes"], self.num_workers)
        self._stop = weakref.finalize(self, crew.stop)  # also when the pool is dropped, and at exit
        return crew

    def take(self, name: str, reply: _Reply) -> Tensor:
        """Scores [B] out of a worker's reply; keeps count of failures, and says once what the worker had to say."""
        for record in reply.records:
            if (record.name, record.msg) not in self._said:
                self._said.add((record.name, record.msg))
                logging.getLogger(record.name).handle(record)
        if reply.error is not None:
            raise reply.error from RuntimeError(f"in the worker process:\n{reply.trace}")
        if self.places[name] == "processes":
            self.models[name].failed += int(np.isnan(reply.scores).sum())
        return torch.from_numpy(reply.scores)


class PendingScores:
    """Scores of one batch, there or on their way."""

    def __init__(self, pool: ScoringPool, names: Sequence[str]) -> None:
        self._pool, self.names = pool, list(names)
        self.columns: dict[str, Tensor] = {}
        self.jobs: dict[str, Future[_Reply]] = {}

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return all(job.done() for job in self.jobs.values())

    def result(self) -> Tensor:
        """Wait for the scores: [B, R], NaN where one could not score, columns in the order of the names.

        Raises:
            RuntimeError: As `ScoringPool.submit`.
        """
        while self.jobs:
            name = next(iter(self.jobs))
            self.columns[name] = self._pool.take(name, self.jobs[name].result())
            del self.jobs[name]
        return torch.stack([self.columns[name] for name in self.names], 1)


@dataclass
class _Reply:
    """What came of a batch in a worker: scores [B], or an error and its traceback; and what was logged."""

    scores: NDArray[np.float32]
    records: list[logging.LogRecord]
    error: Exception | None = None
    trace: str = ""


class _Crew:
    """Threads that score, and threads that each keep a worker process busy."""

    def __init__(self, threaded: dict[str, RewardModel], spawned: dict[str, RewardModel], size: int) -> None:
        self._threaded = threaded
        self._threads = ThreadPoolExecutor(size, "recast-scoring")
        self._keepers = ThreadPoolExecutor(size, "recast-scoring-process")
        self.workers = [_Worker(spawned) for _ in range(size)] if spawned else []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)

    def start(self, place: Place, name: str, images: Tensor, prompts: list[Prompt]) -> Future[_Reply]:
        if place == "threads":
            return self._threads.submit(self._score, name, images, prompts)
        return self._keepers.submit(self._send, name, images.numpy(), prompts)

    def _score(self, name: str, images: Tensor, prompts: list[Prompt]) -> _Reply:
        with _named(name):
            return _Reply(self._threaded[name](images, prompts).numpy(), [])

    def _send(self, name: str, images: NDArray, prompts: list[Prompt]) -> _Reply:
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

    def score(self, name: str, images: NDArray, prompts: list[Prompt]) -> _Reply:
        try:
            self.pipe.send((name, images, prompts))
            reply: _Reply = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join(1)
            raise RuntimeError(
                f"The worker process of reward {name!r} died (exit code {self.process.exitcode}): what it said is above; "
                "-9 is often a machine out of memory. Fewer num_workers need less of it."
            ) from error
        return reply


@contextmanager
def _named(name: str) -> Iterator[None]:
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
            with _named(name):
                scores = models[name].to("cpu")(torch.from_numpy(images), prompts)
            reply = _Reply(scores.numpy(), listener.take())
        except Exception as error:
            reply = _Reply(np.zeros(0, np.float32), listener.take(), error, traceback.format_exc())
        pipe.send(reply)


def _follow_parent() -> None:
    """End with the parent, even in the middle of a batch: it may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
