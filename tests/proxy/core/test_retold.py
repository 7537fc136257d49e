from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.exchange import Exchange
from ajet_proxy.core.retold import Retold, shown
from tests.kit import tapes
from tests.kit.record_responses import FILE
from tests.proxy.core.dialects.answers import dump, exchange

RESPONSES = "/v1/responses"


def answered(path: str = RESPONSES, *, response: Any = "resp_1", **asked: Any) -> Exchange:
    """An exchange whose answer has the id `response`."""
    running = exchange(path, asked)
    running.on_headers(200, "application/json")
    running.feed(dump({"id": response, "status": "completed", "model": "policy", "output": []}).encode())
    running.finish()
    return running


def knows(retold: Retold, path: str, method: str = "GET") -> bool:
    return retold.reader(method, path) is not None


@pytest.mark.parametrize("name", ["plain", "logprobs", "ids", "tool", "nulls"])
def test_a_response_that_is_fetched_is_what_the_agent_was_told(name: str) -> None:
    told = tapes.load(FILE)
    asked, kept = told[name, tapes.AGENT], told[name, tapes.PROXY]
    running = exchange(RESPONSES, asked.request)
    running.on_headers(200, "application/json")
    running.feed(kept.body)
    seen = b"".join(running.finish())
    retold = Retold()
    retold.note(running)
    for _ in range(2):
        reader = retold.reader("GET", f"{RESPONSES}/{json.loads(kept.body)['id']}")
        assert reader is not None
        assert shown(reader, kept.body) == seen
    assert seen != kept.body


@pytest.mark.parametrize(("method", "path", "known"), [
    ("GET", f"{RESPONSES}/resp_1", True), ("GET", f"{RESPONSES}/resp_1/", True), ("GET", f"{RESPONSES}/resp_2", False),
    ("DELETE", f"{RESPONSES}/resp_1", False), ("GET", f"{RESPONSES}/resp_1/input_items", False), ("GET", "/", False),
])  # fmt: skip
def test_only_what_fetches_a_known_response_is_read(method: str, path: str, known: bool) -> None:
    retold = Retold()
    retold.note(answered())
    assert knows(retold, path, method) == known


def test_what_the_engine_does_not_keep_is_not_remembered() -> None:
    retold = Retold()
    retold.note(answered(store=False))
    retold.note(answered(response=7))
    retold.note(exchange(RESPONSES))
    retold.note(exchange("/v1/completions"))
    assert not any(knows(retold, f"{RESPONSES}/{name}") for name in ("resp_1", "7", "None"))


def test_the_latest_are_remembered() -> None:
    retold = Retold(limit=2)
    for name in ("a", "b", "c"):
        retold.note(answered(response=name))
    assert [knows(retold, f"{RESPONSES}/{name}") for name in ("a", "b", "c")] == [False, True, True]


@pytest.mark.parametrize("body", [b"{", b"7", b"\xff", b'{"status":"completed"}', b'{"output":7}'])
def test_what_is_no_response_stays_as_it_is(body: bytes) -> None:
    assert shown(answered().reader(), body) == body
