"""Scores images, slow rewards in the background while the next batch is being sampled.

A reward says by its class attribute `workers` where it runs: ``inline`` (at once, on the device), in ``threads`` (it
waits for somebody else, e.g. a server) or in ``processes`` (it works on the CPU for itself, e.g. OCR).

Shape legend: B batch, R rewards.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import RewardModel
from recast_lightning.rollout.workers import Place, Reply, Workers, naming


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
        offload: Bring each reward's weights back to the CPU after each batch that it scores.
    """

    def __init__(
        self,
        models: dict[str, RewardModel],
        num_workers: int = 0,
        device: torch.device | None = None,
        offload: bool = False,
    ) -> None:
        for model in models.values():
            model.offloaded = offload
        self.models, self.num_workers, self.device = models, num_workers, device
        self.places = {name: place_of(name, model) if num_workers else "inline" for name, model in models.items()}
        self._pending: deque[PendingScores] = deque()
        self._workers: Workers | None = None
        self._stop: Callable[[], object] = lambda: None
        self._said: set[tuple[str, str]] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which starts workers of its own when it needs them."""
        return {**vars(self), "_pending": deque(), "_workers": None, "_stop": lambda: None}

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
            if self._workers is None:
                self._workers = self._start_workers()
            pixels = (images if images.dtype == torch.uint8 else images.float()).detach().cpu()
            for name in away:
                batch.jobs[name] = self._workers.start(self.places[name], name, pixels, list(prompts))
            self._pending.append(batch)
        for name in names:
            if name not in batch.columns and name not in batch.jobs:
                with naming(name):
                    batch.columns[name] = self.models[name].to(self.device or images.device)(images, prompts)
        return batch

    def score(self, images: Tensor, prompts: Sequence[Prompt], names: Sequence[str]) -> Tensor:
        """Scores [B, R] of images [B, 3, H, W] in [0, 1] by the named rewards; NaN where one could not score.

        Autocast is for the policy: scores are the same with and without it.

        Raises:
            RuntimeError: As `submit`.
        """
        with self.running(), torch.autocast(images.device.type, enabled=False):
            return self.submit(images, prompts, names).result()

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
        self._workers = None
        self._stop()

    def _start_workers(self) -> Workers:
        kinds = {place: {n: m for n, m in self.models.items() if self.places[n] == place} for place in get_args(Place)}
        for name, model in kinds["threads"].items():
            with naming(name):
                model.load()  # once, before several threads would
        workers = Workers(kinds["threads"], kinds["processes"], self.num_workers)
        self._stop = weakref.finalize(self, workers.stop)  # also when the pool is dropped, and at exit
        return workers

    def scores_of(self, name: str, reply: Reply) -> Tensor:
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
        self.jobs: dict[str, Future[Reply]] = {}

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
            self.columns[name] = self._pool.scores_of(name, self.jobs[name].result())
            del self.jobs[name]
        return torch.stack([self.columns[name] for name in self.names], 1)
