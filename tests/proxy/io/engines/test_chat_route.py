"""Anthropic's protocol before an engine that is no vLLM: it passes as it is if the engine speaks it and has no chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy.core.ledger import views
from tests.kit.answering import running
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, MESSAGES, Front, until

pytestmark = pytest.mark.usefixtures("flying")

HELLO = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
UNCARRIED = {**HELLO, "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file"}}]}]}
OWN = b'{ "type":"message", "own": 1, "stop_reason": "end_turn" }'
EVENTS = b'event: message_start\ndata: {"type":"message_start"}\n\nevent: odd\ndata: {"not": "anthropic\'s"}\n\n'
EVENTS += b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\ndata: {"type":"message_stop"}\n\n'


class Foreign:
    """An engine that answers `routes` with `status`; it notes what it is asked."""

    def __init__(self, *routes: str, status: int = 200) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.status = status
        self.app = web.Application(middlewares=[self._note])
        for route in routes:
            self.app.router.add_post(route, self._answer)

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/health":  # an engine that is slow to answer is asked whether it is well
            self.seen.append((request.method, request.path_qs, await request.read()))
        response: web.StreamResponse = await handler(request)
        return response

    async def _answer(self, request: web.Request) -> web.Response:
        stream = json.loads(await request.read()).get("stream")
        body, kind = (EVENTS, "text/event-stream") if stream else (OWN, "application/json")
        return web.Response(status=self.status, body=body, headers={"Content-Type": kind, "X-Own": "1"})


@asynccontextmanager
async def fronted(engine: Foreign, **settings: Any) -> AsyncIterator[Front]:
    async with running(engine.app) as url, Front(url, **settings) as front:
        yield front


async def ask(front: Front, body: Any, query: str = "") -> Answer:
    return await send(f"{front.url}/e/x{MESSAGES}{query}", body=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_has_no_chat_gets_the_clients_own_request(stream: bool) -> None:
    engine = Foreign(MESSAGES)
    body = json.dumps({**HELLO, "stream": stream}, indent=1).encode()
    async with fronted(engine) as front:
        first = await ask(front, body, "?beta=true")
        again = await ask(front, body)
    for answer in (first, again):
        assert (answer.status, answer.headers["x-own"]) == (200, "1")
        assert answer.body == (EVENTS if stream else OWN)
    assert [(method, path) for method, path, _ in engine.seen] == [
        ("POST", CHAT + "?beta=true"), ("POST", MESSAGES + "?beta=true"), ("POST", MESSAGES)
    ], "an engine that is known to have no chat is not asked again"  # fmt: skip
    assert [sent for _, path, sent in engine.seen if path.startswith(MESSAGES)] == [body, body]
    assert front.lost == ["no_chat_route"] * 2 and front.running == 0


async def test_what_cannot_be_carried_passes_if_the_engine_has_no_chat() -> None:
    engine = Foreign(MESSAGES)
    async with fronted(engine) as front:
        answers = [await ask(front, UNCARRIED) for _ in range(2)]
    assert [answer.json() for answer in answers] == [json.loads(OWN)] * 2
    assert [(method, path) for method, path, _ in engine.seen] == [
        ("GET", CHAT), ("GET", MESSAGES), ("POST", MESSAGES), ("POST", MESSAGES)
    ]  # fmt: skip
    assert json.loads(engine.seen[-1][2]) == UNCARRIED and engine.seen[0][2] == b""
    assert front.lost == ["no_chat_route"] * 2


@pytest.mark.parametrize("routes", [(CHAT, MESSAGES), (CHAT,), ()])
async def test_what_cannot_be_carried_is_refused_by_all_others(routes: tuple[str, ...]) -> None:
    engine = Foreign(*routes)
    async with fronted(engine) as front:
        answer = await ask(front, UNCARRIED)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert {method for method, _, _ in engine.seen} == {"GET"}, "the engine must not see it"


async def test_an_engine_that_has_neither_says_so_itself() -> None:
    engine = Foreign()
    async with fronted(engine) as front:
        answers = [await ask(front, HELLO) for _ in range(2)]
    assert [answer.status for answer in answers] == [404, 404]
    assert [path for _, path, _ in engine.seen] == [CHAT, MESSAGES] * 2, "what an engine has not it may get"
    assert front.lost == ["refused"] * 2


async def test_the_engines_own_refusal_passes_as_it_is() -> None:
    engine = Foreign(MESSAGES, status=429)
    async with fronted(engine) as front:
        answer = await ask(front, HELLO)
    assert (answer.status, answer.body) == (429, OWN)
    assert front.lost == ["refused"]


async def test_a_request_that_cannot_be_carried_waits_at_the_gate_like_any_other() -> None:
    engine = Foreign(MESSAGES)
    async with fronted(engine, hold_s=0.1) as front:
        front.close_gate()
        answer = await ask(front, UNCARRIED)
    assert (answer.status, engine.seen) == (503, [])


async def test_the_episodes_model_takes_the_place_of_the_requests() -> None:
    engine = Foreign(MESSAGES)
    async with fronted(engine) as front:
        front.open("x", model="policy")
        for _ in range(2):
            await ask(front, b'{"model": "m", "max_tokens":5,  "messages": [{"role":"user","content":"Hi"}]}')
    own = b'{"model": "policy", "max_tokens":5,  "messages": [{"role":"user","content":"Hi"}]}'
    assert [body for _, path, body in engine.seen if path == MESSAGES] == [own, own]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_its_own_without_an_end_is_none(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.proxy.io.engines.test_chat_route.OWN", b'{"type":"error","error":{"type":"overloaded"}}')
    monkeypatch.setattr("tests.proxy.io.engines.test_chat_route.EVENTS", b'data: {"type":"message_start"}\n\n')
    async with fronted(Foreign(MESSAGES)) as front:
        answer = await ask(front, HELLO | {"stream": stream})
        assert (answer.status, answer.body) == (200, EVENTS if stream else OWN)
        await until(lambda: front.lost[1:])
        unanswered = views.record(front.store.state, "x")["unanswered"]
    assert [one["reason"] for one in unanswered] == front.lost[1:] == ["truncated" if stream else "engine_error"]
