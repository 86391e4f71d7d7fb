"""HTTPReward: a reward that scores elsewhere, behind a small JSON protocol (docs/http-reward.md)."""

import json
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

import torch

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import PositiveMap
from recast_lightning.rewards.preprocessing import Picture
from recast_lightning.rewards.remote.client import RequestFailedError, check_url, excerpt
from recast_lightning.rewards.remote.reward import RemoteReward, Verdict, failed, png_base64

_log = logging.getLogger(__name__)
_LARGEST = torch.finfo(torch.float32).max
_ROUNDING = 1e-6  # by which float32 arithmetic may leave the range, relative to a bound above 1


class HTTPReward(RemoteReward):
    """Scores from a server of yours, which may wrap any model in an environment of its own.

    Pictures travel as PNG, with 8 bits a channel, and prompts with all their metadata. ``examples/reward_server.py``
    serves any reward of this package.

    Args:
        url: Where to post, for example ``http://127.0.0.1:8000/score``.
        name: What messages call this reward.
        health_path: Where on the same server :meth:`check` asks.
        needs: The metadata keys that the server needs.
        score_range: The smallest and the largest score possible; a score outside is a failure. The default promises
            nothing, and so a profile needs a `positive_map`.
        version: If given, scores of any other version are failures.
        timeout: Seconds that the server may stay silent, and that the body of its reply may take in all.
        retries: How often a request is repeated after a connection error, a time-out, 429 or 5xx.
        backoff: Seconds before the first repetition, doubled for each further one.
        batch_size: Images a request. A request that fails loses them all.
        concurrency: Requests at once.
        positive_map: See :meth:`RewardModel.positive`.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "http",
        health_path: str = "/health",
        needs: tuple[str, ...] = (),
        score_range: tuple[float, float] = (-math.inf, math.inf),
        version: str = "",
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.5,
        batch_size: int = 8,
        concurrency: int = 4,
        positive_map: PositiveMap | None = None,
    ) -> None:
        super().__init__(
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            batch_size=batch_size,
            concurrency=concurrency,
            positive_map=positive_map,
        )
        if not name:
            raise ValueError("name is empty: give the reward a name for its messages.")
        if not score_range[0] < score_range[1]:
            raise ValueError(f"score_range is {list(score_range)}: expected the smallest and the largest score.")
        self.url = url
        self.health_path = health_path
        self.score_range = score_range
        # Facts of the class elsewhere, but here each server has its own.
        self.name, self.needs, self.version = name, tuple(needs), version
        self._seen_version: str | None = None
        self._version_changed = False

    def validate(self) -> None:
        """Check the form of the addresses, without touching the network.

        Raises:
            ValueError: If one is malformed.
        """
        check_url(self.url, f"url of {self.name}")
        if not self.health_path.startswith("/") or self.health_path.startswith("//"):
            raise ValueError(
                f"The health_path of {self.name} is {self.health_path!r}: expected a path such as /health."
            )
        check_url(urljoin(self.url, self.health_path), f"health address of {self.name}")

    def check(self) -> dict[str, str]:
        """Ask the server whether it is ready.

        Returns:
            Its ``name`` and ``version``; empty where it gives none.

        Raises:
            ValueError: If it cannot be reached, is not ready, or has another version than asked for.
        """
        self.validate()
        address = urljoin(self.url, self.health_path)
        health = self._get(address)
        if not isinstance(health, dict) or health.get("ready") is not True:
            raise ValueError(f'{self.name}: the server at {address} does not say "ready": true.')
        found = {key: excerpt(str(health.get(key) or "")) for key in ("name", "version")}
        if self.version and found["version"] != self.version:
            raise ValueError(f"{self.name}: {address} has version {found['version']!r}, not {self.version!r}.")
        return found

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Check that what is needed is there and that metadata can travel.

        Raises:
            ValueError: Naming the first prompt where that is not so.
        """
        super().check_prompts(prompts)
        for prompt in prompts:
            try:
                json.dumps(prompt.metadata, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"The metadata of the prompt {prompt.text!r} is not JSON: {error}.") from error

    def _ask(self, pictures: Sequence[Picture], prompts: Sequence[Prompt], stop: threading.Event) -> Sequence[Verdict]:
        payload = {
            "images": [png_base64(picture) for picture in pictures],
            "prompts": [{"text": prompt.text, "metadata": prompt.metadata} for prompt in prompts],
        }
        reply = self.client.ask(self.url, payload, stop=stop)
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if not isinstance(scores, list):
            raise RequestFailedError('the reply has no list "scores"')
        if len(scores) != len(pictures):
            raise RequestFailedError(f"the reply has {len(scores)} scores for {len(pictures)} images")
        self._check_version(reply.get("version"))
        reasons = reply.get("reasons")
        if not isinstance(reasons, list) or len(reasons) != len(scores):
            reasons = [None] * len(scores)
        return [self._read(score, reason) for score, reason in zip(scores, reasons, strict=True)]

    def _check_version(self, found: Any) -> None:
        """Refuse a version that was not asked for; where none was, warn once if it changes on the way."""
        version = "" if found is None else excerpt(str(found))
        if self.version and version != self.version:
            raise RequestFailedError(f"the server has version {version!r}, not {self.version!r}")
        if self._seen_version is None:
            self._seen_version = version
        elif version != self._seen_version and not self._version_changed:
            self._version_changed = True
            _log.warning(
                "%s: the server's version was %r and is now %r, so scores may not be comparable (said once)",
                self.name,
                self._seen_version,
                version,
            )

    def _read(self, score: Any, reason: Any) -> Verdict:
        if score is None:
            said = excerpt(reason) if isinstance(reason, str) else ""
            return failed(said or "the server gave no reason")
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            return failed("the server gave something else than a number")
        if not -_LARGEST <= score <= _LARGEST:
            return failed("the server gave NaN, an infinity, or a number too large")
        low, high = self.score_range
        inside = min(max(float(score), low), high)
        if abs(inside - score) > _ROUNDING * max(1.0, abs(inside)):
            return failed(f"the server gave a score outside the score_range [{low:g}, {high:g}]")
        return Verdict(inside)
