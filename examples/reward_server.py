"""Serve any reward model over HTTP, for HTTPReward (docs/http-reward.md).

    python examples/reward_server.py recast_lightning.rewards.OCR --init '{"detect": false}' --port 8000

It runs in whatever environment the reward needs; recast_lightning must be importable there. There is no authentication:
keep it on 127.0.0.1, and reach it from elsewhere through a tunnel.
"""

import argparse
import base64
import binascii
import importlib
import io
import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from PIL import Image

from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rewards import RewardModel

MAX_REQUEST = 64 << 20  # bytes
MAX_SIDE = 4096  # pixels of a picture
SILENCE = 60  # seconds after which a client that says nothing is dropped


class RequestError(Exception):
    """A request that cannot be served, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def build(class_path: str, init_args: dict[str, Any]) -> Any:
    """An object by the dotted path of its class; arguments of the form {"class_path", "init_args"} are built first.

    Raises:
        ValueError: If there is no such class, or it does not take these arguments.
    """
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"There is no class {class_path}: {error}.") from error
    nested = {
        key: build(value["class_path"], value.get("init_args", {}))
        if isinstance(value, dict) and "class_path" in value
        else value
        for key, value in init_args.items()
    }
    try:
        return cls(**nested)
    except TypeError as error:
        raise ValueError(f"{class_path} does not take these arguments: {error}.") from error


def read_request(body: bytes) -> tuple[torch.Tensor, list[Prompt]]:
    """The images (uint8, [B, 3, H, W]) and prompts of a request.

    Raises:
        RequestError: 400, if it is malformed.
    """
    try:
        request = json.loads(body)
        images, prompts = request["images"], request["prompts"]
        pictures = [read_picture(text) for text in images]
        read = [Prompt(prompt["text"], prompt.get("metadata") or {}) for prompt in prompts]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(400, f"The request is malformed: {type(error).__name__}: {error}.") from error
    if not all(isinstance(prompt.text, str) and isinstance(prompt.metadata, dict) for prompt in read):
        raise RequestError(400, "The request is malformed: a prompt needs a text and, if anything, a metadata object.")
    if len({picture.shape for picture in pictures}) > 1:
        raise RequestError(400, "The pictures of one request must share one size.")
    if not pictures:
        return torch.zeros(0, 3, 1, 1, dtype=torch.uint8), read
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2), read


def read_picture(text: str) -> np.ndarray:
    """A base64 PNG as [H, W, 3].

    Raises:
        ValueError: If it is none, or too large.
    """
    try:
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as image:
            if max(image.size) > MAX_SIDE:
                raise ValueError(f"a picture is {image.size[0]} x {image.size[1]}: at most {MAX_SIDE} a side are read")
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, binascii.Error, Image.DecompressionBombError) as error:
        raise ValueError("a picture is not a PNG file in base64") from error


class RewardServer(ThreadingHTTPServer):
    """Answers GET /health and POST /score; one request is scored at a time.

    Args:
        reward: What scores.
        host: The address to listen on.
        port: 0 for any free one; ``server_port`` tells which.
        max_request: Bytes of the largest request.
    """

    daemon_threads = False  # so that closing waits for requests under way
    request_queue_size = 128

    def __init__(self, reward: RewardModel, host: str, port: int, max_request: int = MAX_REQUEST) -> None:
        super().__init__((host, port), Handler)
        self.reward = reward
        self.max_request = max_request
        self._lock = threading.Lock()
        self._reasons: list[str] = []
        log = reward._report
        reward._report = lambda reason: (self._reasons.append(reason), log(reason))

    def score(self, images: torch.Tensor, prompts: list[Prompt]) -> dict[str, Any]:
        """Scores, and what the reward said about images without one; it does not say which image it meant."""
        with self._lock:
            self._reasons.clear()
            scores = self.reward(images, prompts).tolist()
            said = "; ".join(dict.fromkeys(self._reasons)) or f"{self.reward.name} could not score it"
        missing = [score != score for score in scores]
        return {
            "scores": [None if gone else score for gone, score in zip(missing, scores, strict=True)],
            "reasons": [said if gone else None for gone in missing],
            "version": self.reward.version,
        }


class Handler(BaseHTTPRequestHandler):
    """One request; every answer is JSON."""

    server: RewardServer
    timeout = SILENCE

    def do_GET(self) -> None:
        """Tell that the server is ready; it listens only once the weights are loaded."""
        if self.path != "/health":
            return self.answer(404, {"error": "GET /health or POST /score."})
        reward = self.server.reward
        return self.answer(200, {"name": reward.name, "version": reward.version, "ready": True})

    def do_POST(self) -> None:
        """Score pictures."""
        try:
            status, content = 200, self.score()
        except RequestError as error:
            status, content = error.status, {"error": str(error)}
        except Exception as error:
            status, content = 500, {"error": f"The reward failed with {type(error).__name__}: {error}"}
        self.answer(status, content)

    def score(self) -> dict[str, Any]:
        """The answer to a request for scores.

        Raises:
            RequestError: If there is none.
        """
        body = self.read_body()
        if self.path != "/score":
            raise RequestError(404, "GET /health or POST /score.")
        images, prompts = read_request(body)
        try:
            return self.server.score(images, prompts)
        except ValueError as error:  # the reward's own sentence about the input
            raise RequestError(400, str(error)) from error

    def read_body(self) -> bytes:
        """The body of the request, within the bound."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise RequestError(411, "The request needs a Content-Length.")
        left, limit = int(length), self.server.max_request
        try:
            if left <= limit:
                return self.rfile.read(left)
            left = min(left, 4 * limit)
            while left > 0 and (chunk := self.rfile.read(min(left, 1 << 16))):  # a client that sends reads no answer
                left -= len(chunk)
        except OSError as error:
            raise RequestError(408, "The request did not arrive.") from error
        raise RequestError(413, f"The request is longer than {limit} bytes: send fewer images.")

    def answer(self, status: int, content: dict[str, Any]) -> None:
        """Send JSON."""
        body = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has gone

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Log failures only."""
        if code != 200:
            super().log_request(code, size)


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve a reward model over HTTP.")
    parser.add_argument("reward", help="dotted path of its class, for example recast_lightning.rewards.OCR")
    parser.add_argument("--init", default="{}", help="JSON object with the arguments of its constructor")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on; anyone who reaches it may score")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument("--device", default="cpu", help="where the reward scores, for example cuda")
    options = parser.parse_args(arguments)
    try:
        init = json.loads(options.init)
        if not isinstance(init, dict):
            raise ValueError(f"--init is {options.init}: expected a JSON object.")
        reward = build(options.reward, init)
        if not isinstance(reward, RewardModel):
            raise ValueError(f"{options.reward} is no RewardModel.")
        reward.to(options.device).load()
        server = RewardServer(reward, options.host, options.port)
    except (ValueError, OSError, OverflowError) as error:
        print(f"reward_server: error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server:
        try:
            print(f"{reward.name} listens on http://{options.host}:{server.server_port}/score", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopping", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
