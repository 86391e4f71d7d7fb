"""A web server on this machine that plays from a script, for rewards that ask one."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """One answer: JSON or bytes, with what goes wrong on the way.

    Args:
        length: A false Content-Length; None: the true one.
        delay: Seconds before the answer.
        drip: Seconds between any two bytes of the body.
    """

    content: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    delay: float = 0.0
    drip: float = 0.0


HANG_UP = Answer(status=0)


class Script(ThreadingHTTPServer):
    """Gives the answers of `script` in turn, then what `otherwise` makes of the request's JSON; remembers requests."""

    daemon_threads = False
    request_queue_size = 64

    def __init__(self, *script, otherwise=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.otherwise = list(script), otherwise
        self.requests: list[tuple[str, str, dict, Any]] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def next(self, request):
        with self.lock:
            self.requests.append(request)
            if self.script:
                return self.script.pop(0)
        return self.otherwise(request[3])


class _Handler(BaseHTTPRequestHandler):
    def handle_one(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {key.lower(): value for key, value in self.headers.items()}
        answer = self.server.next((self.command, self.path, headers, json.loads(body) if body else None))
        self.server.closing.wait(answer.delay)
        if answer is HANG_UP:
            return
        content = answer.content if isinstance(answer.content, bytes) else json.dumps(answer.content).encode()
        try:
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content) if answer.length is None else answer.length))
            self.end_headers()
            for piece in [content] if not answer.drip else [content[i : i + 1] for i in range(len(content))]:
                self.wfile.write(piece)
                time.sleep(answer.drip)
        except OSError:
            pass

    do_GET = do_POST = handle_one

    def log_message(self, *args):
        pass


@contextmanager
def serving(server):
    """Run a server in a thread; at the end, all its threads are gone."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        if isinstance(server, Script):
            server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
