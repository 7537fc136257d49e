from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.kept_responses import LIMIT, Retold, answers, fetched, shown
from tests.kit import tapes
from tests.kit.record_responses import FILE
from tests.proxy.core.protocol.answers import dump, exchange

RESPONSES = "/v1/responses"


def answered(path: str = RESPONSES, *, response: Any = "resp_1", **asked: Any) -> Exchange:
    """An exchange whose answer has the id `response`."""
    running = exchange(path, asked)
    running.on_headers(200, "application/json")
    running.feed(dump({"id": response, "status": "completed", "model": "policy", "output": []}).encode())
    running.finish()
    return running


def noted(*exchanges: Exchange, limit: int = LIMIT) -> Retold:
    retold = Retold(limit)
    for running in exchanges:
        for response in answers(running):
            retold.keep(response, running.ask)
    return retold


def knows(retold: Retold, response: str) -> bool:
    return retold.kept(response) is not None


@pytest.mark.parametrize("name", ["plain", "logprobs", "ids", "tool", "nulls"])
def test_a_response_that_is_fetched_is_what_the_agent_was_told(name: str) -> None:
    told = tapes.load(FILE)
    asked, kept = told[name, tapes.AGENT], told[name, tapes.PROXY]
    running = exchange(RESPONSES, asked.request)
    running.on_headers(200, "application/json")
    running.feed(kept.body)
    seen = b"".join(running.finish())
    ask = noted(running).kept(json.loads(kept.body)["id"])
    assert ask is not None
    for _ in range(2):
        assert shown(ask, kept.body) == seen
    assert seen != kept.body


@pytest.mark.parametrize(("method", "path", "response"), [
    ("GET", f"{RESPONSES}/resp_1", "resp_1"), ("GET", f"{RESPONSES}/resp_1/", "resp_1"), ("GET", "/", None),
    ("GET", f"{RESPONSES}/resp%5F1", "resp_1"), ("DELETE", f"{RESPONSES}/resp_1", None),
    ("GET", f"{RESPONSES}/resp_1/input_items", None),
])  # fmt: skip
def test_only_what_fetches_a_response_is_read(method: str, path: str, response: str | None) -> None:
    assert fetched(method, path) == response


def test_what_the_engine_does_not_keep_is_not_remembered() -> None:
    asked = answered(store=False), answered(response=7), exchange(RESPONSES), exchange("/v1/completions")
    assert not any(knows(noted(*asked), name) for name in ("resp_1", "7", "None"))
    assert knows(noted(answered()), "resp_1")


def test_the_latest_are_remembered() -> None:
    retold = noted(*(answered(response=name) for name in ("a", "b", "c")), limit=2)
    assert [knows(retold, name) for name in ("a", "b", "c")] == [False, True, True]


@pytest.mark.parametrize("body", [b"{", b"7", b"\xff", b'{"status":"completed"}', b'{"output":7}'])
def test_what_is_no_response_stays_as_it_is(body: bytes) -> None:
    assert shown(answered().ask, body) == body
