"""What rewards on a server share: JSON over HTTP, bounded and retried, and many requests at once in order."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import re
import ssl
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards.base import PositiveMap, RewardModel

if TYPE_CHECKING:
    import httpx

_connecting = threading.Lock()

Picture = NDArray[np.uint8]  # [H, W, 3], red first
_MAX_REPLY = 1 << 20  # bytes
_SECRET = re.compile("key|token|secret|password|signature|auth", re.IGNORECASE)  # in names of a query
_LONGEST_WAIT = 60.0  # seconds between two tries, whatever the server asks for
_MAX_EXCERPT = 200  # characters of a server's own words in a message
_MAX_REASONS = 20  # distinct ones that are logged; a server could invent a new one for every image


class RequestFailedError(Exception):
    """A request without a usable reply; the message says why and holds no secret."""


class _PassingError(RequestFailedError):
    """A failure that another try may mend, `wait` seconds from now at the earliest."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Verdict(NamedTuple):
    """A score, or NaN and the reason why there is none."""

    score: float
    reason: str = ""


def failed(reason: str) -> Verdict:
    """The verdict on an image that could not be scored."""
    return Verdict(math.nan, reason)


class JsonClient:
    """Asks HTTP servers for JSON.

    Connection errors, time-outs, 429 and 5xx are tried again; any other status but 200 is final. Redirects are not
    followed, proxies of the environment are not used, and replies above 1 MiB are refused.

    Args:
        timeout: Seconds that the server may stay silent, and that the body of its reply may take in all.
        retries: How often a request is repeated.
        backoff: Seconds before the first repetition, doubled for each further one. A longer ``Retry-After`` counts
            instead, up to a minute.
    """

    def __init__(self, timeout: float, retries: int, backoff: float) -> None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout}: expected a number of seconds above 0.")
        if retries < 0:
            raise ValueError(f"retries is {retries}: expected at least 0.")
        if not 0 <= backoff < math.inf:
            raise ValueError(f"backoff is {backoff}: expected a number of seconds, at least 0.")
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._connections: httpx.Client | None = None

    def ask(self, url: str, payload: Any = None, *, key: str = "", stop: threading.Event | None = None) -> Any:
        """GET, or POST a JSON payload, and return the JSON reply.

        Args:
            url: One that :func:`check_url` accepts.
            payload: What to post. None: GET.
            key: Sent as a bearer token, and blotted out of messages.
            stop: Once set, no request is repeated.

        Raises:
            RequestFailedError: If there is no usable reply in the end.
        """
        body = None if payload is None else json.dumps(payload).encode()
        stop = stop or threading.Event()
        attempt = 0
        while True:
            try:
                return self._ask_once(url, body, key)
            except _PassingError as failure:
                wait = min(max(failure.wait, self.backoff * 2**attempt), _LONGEST_WAIT)
                if attempt == self.retries or stop.wait(wait):
                    raise RequestFailedError(f"{failure} (tried {attempt + 1}x)") from failure
            attempt += 1

    def _ask_once(self, url: str, body: bytes | None, key: str) -> Any:
        import httpx

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        try:
            with self._connect().stream(
                "GET" if body is None else "POST", url, content=body, headers=headers
            ) as response:
                reply = self._read(response)
        except httpx.TimeoutException as error:
            raise _PassingError(f"no reply within {self.timeout:g} s") from error
        except httpx.TransportError as error:
            if refused := _certificate_error(error):
                raise RequestFailedError(f"the server's certificate is not trusted: {refused}") from error
            raise _PassingError(f"the connection failed with {type(error).__name__}") from error
        return _parse(response, reply, key)

    def _connect(self) -> httpx.Client:
        """The connections, which all threads share."""
        import httpx

        with _connecting:
            if self._connections is None:
                for name in ("httpx", "httpcore"):
                    logging.getLogger(name).setLevel(logging.WARNING)  # they would log every URL
                self._connections = httpx.Client(timeout=self.timeout, trust_env=False, follow_redirects=False)
            return self._connections

    def _read(self, response: httpx.Response) -> bytes:
        """Read the body, within the bounds of size and time."""
        deadline = time.monotonic() + self.timeout
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > _MAX_REPLY:
                raise RequestFailedError(f"the reply is longer than {_MAX_REPLY} bytes")
            if time.monotonic() > deadline:
                raise _PassingError(f"no reply within {self.timeout:g} s")
        return bytes(body)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles travel without the connections and make their own."""
        return {**self.__dict__, "_connections": None}


def _certificate_error(error: BaseException | None) -> str | None:
    """Why the server's certificate is not trusted, if that is the cause."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return None if error is None else str(error.verify_message)


def _parse(response: httpx.Response, reply: bytes, key: str) -> Any:
    """The JSON of a reply with status 200; any other status is an error."""
    status = response.status_code
    try:
        parsed = json.loads(reply)
    except (ValueError, RecursionError) as error:
        parsed = None
        if status == 200:
            raise RequestFailedError("the reply is not JSON") from error
    if status == 200:
        return parsed
    said = parsed.get("error") if isinstance(parsed, dict) else None
    said = said.get("message") if isinstance(said, dict) else said
    said = said if isinstance(said, str) else reply.decode(errors="replace")
    if key:
        said = said.replace(key, "***")
    reason = f"the server answered {status} {response.reason_phrase}: {excerpt(said)}"
    if status == 429 or status >= 500:
        after = response.headers.get("Retry-After", "")
        raise _PassingError(reason, float(after) if after.isascii() and after.isdigit() else 0.0)
    raise RequestFailedError(reason)


def excerpt(text: str) -> str:
    """The beginning of a text from elsewhere, on one line and free of control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _MAX_EXCERPT]).split())[:_MAX_EXCERPT]


def check_url(url: str, what: str) -> None:
    """Check the form of a URL, without touching the network.

    Raises:
        ValueError: If it is not a plain http or https address.
    """
    try:
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        plain = False
    if plain and "@" in parts.netloc:
        raise ValueError(f"The {what} holds a user name or password, which would end up in logs: leave it out.")
    named = sorted(name for name, _ in parse_qsl(parts.query) if _SECRET.search(name)) if plain else []
    if named:
        raise ValueError(f"The {what} holds {named[0]!r} in its query, which would end up in logs: leave it out.")
    if not plain or "#" in url or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"The {what} is {url!r}: expected http://host[:port]/path or https://host[:port]/path.")


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
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: expected at least 1.")
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: expected at least 1.")
        self.client = JsonClient(timeout, retries, backoff)
        self.batch_size = batch_size
        self.concurrency = concurrency

    def score(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] (float32 in [0, 1]), sent with 8 bits a channel; [B], NaN where that fails."""
        self.load()
        pictures = list((images.detach() * 255).round().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy())
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

    @abstractmethod
    def _ask(self, pictures: Sequence[Picture], prompts: Sequence[Prompt], stop: threading.Event) -> Sequence[Verdict]:
        """Ask for one verdict a picture; runs in several threads at once.

        Raises:
            RequestFailedError: If there are no verdicts.
        """
