"""Rewards for tests of the workers; a spawned process must be able to import them."""

import math
import os
import time
from pathlib import Path

import torch

from recast_lightning.errors import UserError
from recast_lightning.rewards import OCR, RewardModel


class Brightness(RewardModel):
    """The mean pixel; NaN for images darker than `least`, with a reason."""

    name = "brightness"
    workers = "inline"

    def __init__(self, *, least: float = -1.0, delay: float = 0.0) -> None:
        super().__init__()
        self.least, self.delay = least, delay

    def score(self, images, prompts):
        time.sleep(self.delay * float(images[0, 0, 0, 0]))  # bright batches finish last
        scores = images.flatten(1).mean(1)
        if (scores < self.least).any():
            self._report(f"it is darker than {self.least}")
        return torch.where(scores < self.least, torch.nan, scores)


class ThreadedBrightness(Brightness):
    workers = "threads"


class SpawnedBrightness(Brightness):
    workers = "processes"


class SpawnedOCR(OCR):
    workers = "processes"


class Whereabouts(RewardModel):
    """Tells in which process it runs, with how many threads, and whether weights travelled."""

    name = "whereabouts"
    workers = "processes"
    score_range = (0.0, math.inf)

    def _load(self):
        return os.getpid()

    def score(self, images, prompts):
        travelled = self._loaded is not None and self._loaded != os.getpid()
        return torch.tensor([self.load(), torch.get_num_threads(), travelled, *[0] * (len(images) - 3)])


class Broken(RewardModel):
    """Fails in the way that it is told to."""

    name = "broken"

    def __init__(self, *, how: str, workers: str = "processes") -> None:
        super().__init__()
        self.how, self.workers = how, workers

    def score(self, images, prompts):
        if self.how == "exit":
            os._exit(3)
        kind = {"user": UserError, "value": ValueError, "key": KeyError}[self.how]
        raise kind("no such thing")


class Sleepy(RewardModel):
    """Takes a minute, and makes the file $SLEEPY when it starts."""

    name = "sleepy"
    workers = "processes"

    def score(self, images, prompts):
        Path(os.environ["SLEEPY"]).touch()
        time.sleep(60)
        return torch.zeros(len(images))


class Unpicklable(RewardModel):
    name = "unpicklable"
    workers = "processes"

    def __init__(self):
        super().__init__()
        self.hook = lambda: None

    def score(self, images, prompts):
        return torch.zeros(len(images))
