"""What rewards on a server share: pictures as PNG, and many requests at once in order."""

import base64
import io
import math
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.ranges import check_ranges
from recast_lightning.rewards.base import PositiveMap, RewardModel
from recast_lightning.rewards.preprocessing import Picture, as_pictures
from recast_lightning.rewards.remote.client import JsonClient, RequestFailedError

_MAX_REASONS = 20  # distinct ones that are logged; a server could invent a new one for every image


class Verdict(NamedTuple):
    """A score, or NaN and the reason why there is none."""

    score: float
    reason: str = ""


def failed(reason: str) -> Verdict:
    """The verdict on an image that could not be scored."""
    return Verdict(math.nan, reason)


def png_base64(picture: Picture) -> str:
    """A picture as the base64 text of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


class RemoteReward(RewardModel):
    """Base of the rewards that ask a server; a subclass asks for the verdicts on one batch.

    Args:
        timeout: See :class:`JsonClient`.
        retries: Likewise.
        backoff: Likewise.
        batch_size: Images a request.
        concurrency: Requests at once.
        positive_map: What makes a profile of negative scores possible, see :meth:`RewardModel.positive`.
    """

    workers = "threads"

    def __init__(
        self,
        *,
        timeout: float,
        retries: int,
        backoff: float,
        batch_size: int,
        concurrency: int,
        positive_map: PositiveMap | None = None,
    ) -> None:
        super().__init__(positive_map)
        options = {"batch_size": batch_size, "concurrency": concurrency}
        check_ranges(options, dict.fromkeys(options, "[1, inf)"))
        self.client = JsonClient(timeout, retries, backoff)
        self.batch_size = batch_size
        self.concurrency = concurrency

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]), sent with 8 bits a channel; [B], NaN where that fails."""
        self.load()
        pictures = as_pictures(images)
        starts = range(0, len(pictures), self.batch_size)
        stop = threading.Event()

        def judge(start: int) -> Sequence[Verdict]:
            end = min(start + self.batch_size, len(pictures))
            try:
                return self._ask(pictures[start:end], prompts[start:end], stop)
            except RequestFailedError as failure:
                return [failed(str(failure))] * (end - start)

        with ThreadPoolExecutor(min(self.concurrency, len(starts)), thread_name_prefix=self.name) as pool:
            try:
                verdicts = [verdict for batch in pool.map(judge, starts) for verdict in batch]
            finally:  # an interrupt waits for requests under way, but not for their repetition
                stop.set()
        for verdict in verdicts:
            if verdict.reason:
                many = len(self._reported) >= _MAX_REASONS
                self._report("for more reasons than are listed here" if many else verdict.reason)
        return torch.tensor([verdict.score for verdict in verdicts])

    def _get(self, address: str, key: str = "") -> Any:
        """The JSON at an address of the server, asked for as :meth:`JsonClient.ask` does.

        Raises:
            ValueError: If there is no usable reply.
        """
        try:
            return self.client.ask(address, key=key)
        except RequestFailedError as failure:
            raise ValueError(f"{self.name} has no server at {address}: {failure}.") from failure

    @abstractmethod
    def _ask(self, pictures: Sequence[Picture], prompts: Sequence[Prompt], stop: threading.Event) -> Sequence[Verdict]:
        """Ask for one verdict a picture; runs in several threads at once.

        Raises:
            RequestFailedError: If there are no verdicts.
        """
