"""A model that judges, scripted: an OpenAI-compatible endpoint in a thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.kit.http_server import started

Answers = Callable[[dict[str, Any]], Any]
"""Gets what is judged, by label; returns the verdicts by label, another text, or an HTTP status."""


class JudgeStub:
    """`url` is its base URL; `asked` has the bodies of requests. `answers` may be replaced."""

    def __init__(self, url: str, answers: Answers) -> None:
        self.url, self.answers = url, answers
        self.asked: list[dict[str, Any]] = []
        self.models = ["grader"]


def shown_in(body: dict[str, Any]) -> dict[str, Any]:
    """What a request has in its fence."""
    found: dict[str, Any] = json.loads(re.split(r"\nDATA-\w+\n", body["messages"][1]["content"])[1])
    return found


@contextmanager
def judging(answers: Answers) -> Iterator[JudgeStub]:
    """``with judging(lambda items: {label: 1.0 for label in items}) as model``"""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": name} for name in stub.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            stub.asked.append(body)
            found = stub.answers(shown_in(body))
            if isinstance(found, int):
                self._say(found, {"error": {"message": "no"}})
                return
            text = found if isinstance(found, str) else json.dumps(found)
            self._say(200, {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 100}})

        def _say(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            with suppress(ConnectionError):  # a judge may be gone by now
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server, url = started(Handler)
    stub = JudgeStub(f"{url}/v1", answers)
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
