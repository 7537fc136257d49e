"""A proxy for trainer tests: section 7 of the contract on a real socket, with batches made by a function of the test.

It checks what the real one would: an ack or extend of an unknown lease is a 404, and it remembers everything it was
told, in order, in `log`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ajet_sdk.frame import encode_batch
from ajet_sdk.sample import Batch

Produce = Callable[["ScriptedProxy", dict[str, Any]], Batch | None]


class ScriptedProxy:
    """Serves on a free loopback port from `start` to `stop`. `produce(proxy, lease_body)` makes the next batch."""

    def __init__(self, produce: Produce) -> None:
        self.produce = produce
        self.log: list[tuple[str, Any]] = []
        self.leased: dict[str, Batch] = {}
        self.gate = "open"
        self.version = -1
        self.upstreams: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                status, content, kind = proxy.answer(self.path.removeprefix("/ajet/v1"), body)
                self.send_response(status)
                if content:
                    self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> ScriptedProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
        if path == "/batches/lease":
            return self._lease(body)
        self.log.append((path, body))
        if path.startswith("/batches/"):
            _, _, batch, verb = path.split("/")
            if batch not in self.leased:
                error = {
                    "error": {"message": f"no lease {batch}", "type": "not_found_error", "code": None, "param": None}
                }
                return 404, json.dumps(error).encode(), "application/json"
            if verb in ("ack", "nack"):
                del self.leased[batch]
        if path == "/gate/close":
            self.gate = "closed"
        if path == "/gate/open":
            self.gate, self.version = "open", body["policy_version"]
        if path == "/policy":
            self.version = body["version"]
            if body.get("upstreams") is not None:
                self.upstreams = body["upstreams"]
        return 200, b"{}", "application/json"

    def _lease(self, body: dict[str, Any]) -> tuple[int, bytes, str]:
        batch = self.produce(self, body)
        if batch is None:
            time.sleep(min(body.get("wait_s", 0), 0.2))
            return 204, b"", ""
        self.leased[batch.batch] = batch
        self.log.append(("/batches/lease", batch.batch))
        return 200, encode_batch(batch), "application/msgpack"

    def told(self, path: str) -> list[Any]:
        """Every body that was posted to `path` (a suffix is enough), in order."""
        return [body for name, body in self.log if name.endswith(path)]
