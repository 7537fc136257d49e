"""Requests: what is tried again, for how long, and how it ends; against a scripted clock."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk import client, errors, routes
from ajet_sdk.client import ATTEMPT_S, BACKOFF_FIRST_S, BACKOFF_MAX_S, Client, NoReply, Reply, Send, Target


class Script(Client):
    """A client with scripted outcomes (the last one for ever), on a clock that only sleeping moves."""

    def __init__(
        self, outcomes: Iterable[Reply | NoReply], *, key: str | None = "ajet-key", deadline: float = 60.0,
        chance: float = 0.0,
    ) -> None:
        super().__init__("http://proxy:8484", deadline=deadline)
        self.target = Target("http://proxy:8484", key, deadline)
        self.outcomes = list(outcomes)
        self.at = [1000.0]
        self.sent: list[Send] = []
        self.slept: list[float] = []
        self.clock = lambda: self.at[0]  # type: ignore[method-assign]
        self.chance = lambda: chance  # type: ignore[method-assign]

    async def attempt(self, send: Send) -> Reply | NoReply:
        self.sent.append(send)
        return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at[0] += seconds

    @property
    def now(self) -> float:
        return self.at[0]

    def heard(self, name: str = "status", *args: Any, **more: Any) -> Reply:
        """The answer to a request."""
        return asyncio.run(self.ask(name, *args, **more))


def reply(status: int = 200, body: Any = None, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, named, json.dumps(body if body is not None else {}).encode())


def test_a_request_carries_key_body_and_query() -> None:
    script = Script([reply(body={"ok": 1})])
    assert script.heard("reward", routes.Reward(1.5, id="r"), id="ep-1").json() == {"ok": 1}
    sent = script.sent[0]
    assert (sent.method, sent.url) == ("POST", "http://proxy:8484/ajet/v1/episodes/ep-1/rewards")
    assert sent.headers["authorization"] == "Bearer ajet-key"
    assert json.loads(sent.content or b"") == {"value": 1.5, "id": "r"}
    script.heard("get_episode", id="ep-1", tokens=1)
    assert script.sent[1].url.endswith("/ajet/v1/episodes/ep-1?tokens=1")
    assert script.sent[1].content is None


def test_without_a_key_none_is_shown() -> None:
    script = Script([reply()], key=None)
    script.heard()
    assert "authorization" not in script.sent[0].headers


def test_a_name_that_would_be_another_path_is_never_sent() -> None:
    script = Script([reply()])
    with pytest.raises(errors.BadRequest):
        script.heard("reward", routes.Reward(1.0), id="../status")
    assert not script.sent


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 501])
def test_a_refusal_is_raised_at_once(status: int) -> None:
    script = Script([reply(status, errors.BadRequest("because", code="c", param="p").to_body())])
    with pytest.raises(errors.AjetError, match="because") as caught:
        script.heard()
    assert type(caught.value) is type(errors.from_body(status, {}))
    assert (caught.value.code, caught.value.param) == ("c", "p")
    assert (len(script.sent), script.slept) == (1, [])


def test_a_web_page_is_no_acknowledgement() -> None:
    script = Script([Reply(200, {"content-type": "text/html; charset=utf-8"}, b"<html>")])
    with pytest.raises(errors.AjetError, match=r"HTTP 200: <html> \(an ajet proxy does not answer like this"):
        script.heard()
    assert len(script.sent) == 1


@pytest.mark.parametrize("passing", [NoReply("gone"), *(reply(status) for status in (408, 429, 500, 502, 503, 504))])
def test_what_may_pass_is_tried_again(passing: Reply | NoReply) -> None:
    script = Script([passing, passing, passing, reply(body={"ok": 1})])
    assert script.heard().json() == {"ok": 1}
    assert len(script.sent) == 4
    assert script.slept == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert len({(sent.method, sent.url, sent.content) for sent in script.sent}) == 1


def test_retry_after_is_honoured_and_never_a_busy_loop() -> None:
    script = Script([reply(503, retry_after="7"), reply(429, retry_after="0"), reply(503, retry_after="soon"), reply()])
    script.heard()
    assert script.slept[0] == 7
    assert script.slept[1] == BACKOFF_FIRST_S
    assert script.slept[2] == 4 * BACKOFF_FIRST_S


def test_at_the_deadline_it_says_what_was_tried() -> None:
    script = Script([NoReply("ConnectError: refused")], deadline=10)
    with pytest.raises(errors.ProxyUnreachable) as caught:
        script.heard()
    assert script.now == pytest.approx(1010)
    for words in ("GET http://proxy:8484/ajet/v1/status", f"{len(script.sent)} attempts in 10 s", "refused", "serve"):
        assert words in caught.value.message


@pytest.mark.parametrize(("status", "kind"), [(503, errors.NotReady), (429, errors.OverQuota)])
def test_a_proxy_that_answers_not_yet_to_the_end_is_quoted(status: int, kind: type[errors.AjetError]) -> None:
    script = Script([reply(status, errors.NotReady("the disk is full").to_body(), retry_after="3")], deadline=9)
    with pytest.raises(kind, match=r"the disk is full .*4 attempts in 9 s") as caught:
        script.heard()
    assert caught.value.retry_after == 3


def test_a_deadline_of_zero_is_one_attempt() -> None:
    script = Script([NoReply("gone")], deadline=0)
    with pytest.raises(errors.ProxyUnreachable, match="1 attempt in 0 s"):
        script.heard()
    assert (len(script.sent), script.slept) == (1, [])
    assert script.sent[0].timeout == client.LEAST_ATTEMPT_S


@given(
    st.lists(st.sampled_from([NoReply("x"), reply(503), reply(503, retry_after="100"), reply(429, retry_after="0")]),
             min_size=1, max_size=30),
    st.floats(0, 300),
    st.floats(0, 1),
)
def test_trying_ends_at_the_deadline_and_pauses_are_bounded(
    outcomes: list[Reply | NoReply], deadline: float, chance: float
) -> None:
    script = Script(outcomes, deadline=deadline, chance=chance)
    with pytest.raises(errors.AjetError):
        script.heard()
    assert script.now - 1000 <= deadline + 1e-6
    assert all(0 < slept <= max(1.5 * BACKOFF_MAX_S, 150) for slept in script.slept)
    assert all(1.0 <= sent.timeout <= ATTEMPT_S for sent in script.sent)


def test_a_pause_draws_nothing_from_the_generator_of_an_agent() -> None:
    """One that seeds it plays the same again, however often a request is tried."""
    before = random.getstate()
    assert Client.chance() != Client.chance()
    assert random.getstate() == before


def test_a_body_that_is_no_json_is_text() -> None:
    assert Reply(200, {}, b"<html>").json() == "<html>"
    assert Reply(200, {}, b"\xff").json() == "\ufffd"


@pytest.mark.parametrize(
    ("environ", "url", "key"),
    [
        ({}, "http://127.0.0.1:8484", None),
        ({"AJET_PROXY_URL": "https://proxy.example/ajet-proxy/"}, "https://proxy.example/ajet-proxy", None),
        ({"AJET_PROXY_URL": ""}, "http://127.0.0.1:8484", None),
        ({"AJET_API_KEY": "secret", "OPENAI_API_KEY": "ajet-x"}, "http://127.0.0.1:8484", "secret"),
        ({"OPENAI_API_KEY": "ajet-x"}, "http://127.0.0.1:8484", "ajet-x"),
        ({"OPENAI_API_KEY": "sk-of-another"}, "http://127.0.0.1:8484", None),
    ],
)
def test_where_the_proxy_is(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], url: str, key: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert Target.resolve() == Target(url, key)
    assert Target.resolve("http://other:1", "mine") == Target("http://other:1", "mine")


def test_an_address_or_a_key_that_is_none_is_refused_and_a_key_is_not_quoted() -> None:
    with pytest.raises(errors.BadRequest, match="must look like"):
        Target.resolve("127.0.0.1:8484")
    with pytest.raises(errors.BadRequest) as caught:
        Target.resolve(key="with space")
    assert "with space" not in caught.value.message
