"""What a trainer asks of engines: over connections that the other side closes, and until it was heard."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from ajet_trainer import engines
from tests.kit.http_server import started


class Engine:
    """vLLM behind uvicorn: an error ends its connection, without a word. The first `deaf` wishes to go on get an error,
    and the first `busy` wishes to forget find a call in flight."""

    def __init__(self) -> None:
        self.frozen, self.deaf, self.busy, self.wants = True, 0, 0, ""
        self.tells = True
        self.asked: list[str] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            broken = False

            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                if self.broken:  # the next request was on its way already
                    self.close_connection = True
                    return
                self.rfile.read(int(self.headers.get("content-length") or 0))
                engine.asked.append(self.path)
                allowed = not engine.wants or self.headers.get("authorization") == f"Bearer {engine.wants}"
                status, body = engine.answer(self.path) if allowed else (401, {"error": "Unauthorized"})
                told = json.dumps(body).encode()
                self.broken = status == 500
                self.send_response(status)
                self.send_header("content-length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_GET = do_POST  # noqa: N815

        self.server, self.url = started(Handler)

    def answer(self, path: str) -> tuple[int, Any]:
        if path == "/resume":
            self.deaf -= 1
            self.frozen = self.frozen and self.deaf >= 0
            return (500, {"error": "not now"}) if self.deaf >= 0 else (200, {"status": "resumed"})
        if path == "/is_paused":
            return (200, {"is_paused": self.frozen}) if self.tells else (404, {"detail": "Not Found"})
        if path == "/reset_prefix_cache":
            self.busy -= 1
            return 200, {"success": self.busy < 0}
        return 500, {"error": "half of it is loaded"}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_what_follows_an_error_is_heard_although_the_server_has_closed_the_connection(engine: Engine) -> None:
    for _ in range(20):
        engine.frozen = True
        with engines.asking(engine.url, 5.0) as asked:
            with pytest.raises(engines.httpx.HTTPStatusError):
                engines.ask(asked, "/collective_rpc")
            assert engines.wake(asked, 5.0) == ""
        assert not engine.frozen


def test_an_engine_is_told_to_go_on_until_it_says_that_it_does(engine: Engine) -> None:
    engine.deaf = 3
    with engines.asking(engine.url, 5.0) as asked:
        assert engines.wake(asked, 20.0) == ""
    assert engine.asked == ["/resume"] * 4 + ["/is_paused"] and not engine.frozen


def test_an_engine_that_does_not_go_on_is_said_to_be_frozen(engine: Engine) -> None:
    engine.deaf = 1000
    with engines.asking(engine.url, 5.0) as asked:
        assert engines.wake(asked, 0.5) == 'HTTP 500 from /resume: {"error": "not now"}'
        engine.answer = lambda path: (200, {"is_paused": True})  # type: ignore[method-assign]
        assert engines.wake(asked, 0.5) == "it stays frozen"


def test_an_engine_that_does_not_tell_is_taken_by_its_word(engine: Engine) -> None:
    engine.tells = False
    with engines.asking(engine.url, 5.0) as asked:
        assert engines.wake(asked, 5.0) == "" and not engine.frozen


def test_a_refusal_is_not_repeated(engine: Engine) -> None:
    engine.wants = "sesame"
    start = time.monotonic()
    with engines.asking(engine.url, 5.0) as asked:
        said = "HTTP 401 from /resume: it wants its API key: set AJET_UPSTREAM_KEY for the trainer, as for the daemon"
        assert engines.wake(asked, 600.0) == said
    assert engine.asked == ["/resume"] and time.monotonic() - start < 300


def test_the_engines_own_key_opens_it(engine: Engine) -> None:
    engine.wants = "sesame"
    with engines.asking(engine.url, 5.0, "sesame") as asked:
        assert engines.wake(asked, 5.0) == ""


def test_an_engine_forgets_once_nothing_uses_what_it_has_computed(engine: Engine) -> None:
    engine.busy = 2
    with engines.asking(engine.url, 5.0) as asked:
        assert engines.forgets(asked, 0.0) is False
        assert engines.forgets(asked, 20.0) is True
        engine.busy = 1000
        assert engines.forgets(asked, 0.3) is False


def test_all_that_failed_is_said(engine: Engine) -> None:
    def fail(url: str) -> None:
        if url != "c":
            raise engines.EngineLost(f"{url} is gone")

    with pytest.raises(engines.EngineLost, match=r"^a is gone; b is gone$"):
        engines.each(["a", "b", "c"], fail)
