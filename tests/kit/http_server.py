"""Plain HTTP servers in a thread, for tests that stand in for an engine, a model or the proxy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Say:
    """An answer, of which the body is JSON; None: empty. If it `breaks` its connection, what is asked next on that is
    closed without a word, as uvicorn does."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    breaks: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """A request as it arrived; header names in lower case. `peer` is the port at the client's end."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    peer: int


class JsonServer(ThreadingHTTPServer):
    """Says `answer` to each request, or closes the connection where that is None; as long as its context is open."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, answer: Callable[[Heard], Say | None], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> JsonServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms until its head is acknowledged
    server: JsonServer
    broken = False

    def handle(self) -> None:
        with suppress(ConnectionError):  # who asks may be killed
            super().handle()

    def do_POST(self) -> None:
        if self.broken:
            self.close_connection = True
            return
        data = self.rfile.read(length := int(self.headers.get("Content-Length") or 0))
        if len(data) < length:  # who asked was killed
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(data) if data else None
        said = self.server.answer(Heard(self.command, self.path, headers, body, self.client_address[1]))
        if said is None:
            self.close_connection = True
            return
        self.broken = said.breaks
        content = b"" if said.body is None else json.dumps(said.body).encode()
        told = {**said.headers, "Content-Type": "application/json", "Content-Length": str(len(content))}
        self.send_response(said.status)
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_DELETE = do_POST  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
