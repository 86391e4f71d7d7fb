"""JSON over HTTP, bounded in size and time and tried again where that may help."""

import json
import re
import ssl
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from recast_lightning.ranges import check_ranges

if TYPE_CHECKING:
    import httpx

_MAX_REPLY = 1 << 20  # bytes
_SECRET = re.compile("key|token|secret|password|signature|auth", re.IGNORECASE)  # in names of a query
_LONGEST_WAIT = 60.0  # seconds between two tries, whatever the server asks for
_MAX_EXCERPT = 200  # characters of a server's own words in a message


class RequestFailedError(Exception):
    """A request without a usable reply; the message says why and holds no secret."""


class _PassingError(RequestFailedError):
    """A failure that another try may mend, `wait` seconds from now at the earliest."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class JsonClient:
    """Asks HTTP servers for JSON, each time over a new connection.

    Connection errors, time-outs, 429 and 5xx are tried again; any other status but 200 is final, and so is a
    certificate that is not trusted. Redirects are not followed, proxies of the environment are not used, and replies
    above 1 MiB are refused.

    Args:
        timeout: Seconds that the server may stay silent, and that the body of its reply may take in all.
        retries: How often a request is repeated.
        backoff: Seconds before the first repetition, doubled for each further one. A longer ``Retry-After`` counts
            instead, up to a minute.
    """

    timeout: float
    retries: int
    backoff: float

    def __post_init__(self) -> None:
        check_ranges(vars(self), {"timeout": "(0, inf)", "retries": "[0, inf)", "backoff": "[0, inf)"})

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

        # Without a compressed reply, the limit of its size holds for what is read.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        client = httpx.Client(timeout=self.timeout, trust_env=False, follow_redirects=False, verify=_trusted())
        try:
            with client, client.stream("GET" if body is None else "POST", url, content=body, headers=headers) as reply:
                return _parse(reply, self._read(reply), key)
        except httpx.InvalidURL as error:  # stricter than check_url
            raise RequestFailedError(f"the address is not valid: {error}") from error
        except httpx.TimeoutException as error:
            raise _PassingError(f"no reply within {self.timeout:g} s") from error
        except httpx.TransportError as error:
            cause: BaseException = error  # httpx wraps what the system says several times
            while deeper := cause.__cause__ or cause.__context__:
                cause = deeper
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise RequestFailedError(f"the server's certificate is not trusted: {cause.verify_message}") from error
            raise _PassingError(f"the connection failed with {type(cause).__name__}") from error

    def _read(self, reply: "httpx.Response") -> bytes:
        """Read the body, within the bounds of size and time."""
        deadline = time.monotonic() + self.timeout
        body = bytearray()
        for chunk in reply.iter_raw():
            body += chunk
            if len(body) > _MAX_REPLY:
                raise RequestFailedError(f"the reply is longer than {_MAX_REPLY} bytes")
            if time.monotonic() > deadline:
                raise _PassingError(f"no reply within {self.timeout:g} s")
        return bytes(body)


@cache
def _trusted() -> ssl.SSLContext:
    """The certificates that the system trusts; httpx by itself would trust a list of its own."""
    return ssl.create_default_context()


def _parse(reply: "httpx.Response", body: bytes, key: str) -> Any:
    """The JSON of a reply with status 200; any other status is an error, and so is an `error` in the reply."""
    import httpx

    status = reply.status_code
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        parsed = None
        if status == 200:
            raise RequestFailedError("the reply is not JSON") from error
    said = parsed.get("error") if isinstance(parsed, dict) else None
    if status == 200 and not said:
        return parsed
    said = said.get("message") if isinstance(said, dict) else said
    said = said if said and isinstance(said, str) else body.decode(errors="replace")
    if key:
        said = said.replace(key, "***")
    beside = " and an error" if status == 200 else ""
    reason = f"the server answered {status} {httpx.codes.get_reason_phrase(status)}{beside}: {excerpt(said)}"
    if status == 429 or status >= 500:
        after = reply.headers.get("Retry-After", "")
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
        (parts.hostname or "").encode("idna")  # a name that cannot be looked up fails here
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
