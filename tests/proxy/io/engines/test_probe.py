"""Asking engines about themselves: once, in the client's name, and only for requests that depend on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tests.kit.answering import answering
from tests.kit.engine_stub import EngineStub
from tests.kit.tapes import steady
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, Front

pytestmark = pytest.mark.usefixtures("flying")

OFF = {"thinking": {"type": "disabled"}}
INLINE = {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}


class Engine:
    """Knows one model, whose template merges system messages and tells efforts apart; refuses the rest."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = ""
        self.garbled = b""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        self.keys.add(request.headers.get("Authorization"))
        if body["model"] != "m":
            return web.json_response({"error": {"message": "no", "type": "NotFoundError"}}, status=404)
        if self.garbled:
            return web.Response(body=self.garbled)
        return web.json_response({"input_tokens": 5, "tokens": list(str(body.get("chat_template_kwargs")).encode())})

    def chats(self) -> list[Any]:
        return [body for path, body in self.asked if path == "/v1/chat/completions"]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    async with answering("/{path:.*}", made.answer) as made.url:
        yield made


async def ask(front: Front, model: str = "m", **more: Any) -> Answer:
    body = {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **more}
    return await send(f"{front.url}/e/x/v1/messages", body=body, headers={"Authorization": "Bearer theirs"})


async def test_it_is_asked_once_for_requests_that_depend_on_it(engine: Engine) -> None:
    async with Front(engine.url) as front:
        await ask(front)
        assert len(engine.asked) == 1
        for more in (INLINE, OFF, INLINE):
            await ask(front, **more)
        assert len(engine.asked) == 1 + 8 + 3
    _, merged, off, _ = engine.chats()
    assert [message["role"] for message in merged["messages"]] == ["system", "user"]
    assert off["reasoning_effort"] == "none"
    assert engine.keys == {"Bearer theirs"}


async def test_other_engines_are_asked_anew(engine: Engine) -> None:
    async with EngineStub(models=("m",)) as stub, Front(engine.url) as front:
        await ask(front, **INLINE)
        front.announce("m", 1, stub.url)
        answer = await ask(front, **INLINE | OFF)
        [asked] = stub.llm_requests()
    assert answer.status == 200
    assert [message["role"] for message in asked.body["messages"]] == ["user", "system"]
    assert asked.body["reasoning_effort"] == "low", "the stub's template ignores efforts"


@pytest.mark.parametrize("garbled", [b"", b"?", b"[" * 100_000])
async def test_an_engine_that_says_nothing_is_asked_again(engine: Engine, garbled: bytes) -> None:
    engine.garbled = garbled
    async with Front(engine.url) as front:
        for _ in range(2):
            await ask(front, "m" if garbled else "nobody", **INLINE)
    assert len(engine.asked) == 2 * (8 + (1 if garbled else 2)), "a 404 may mean that there is no chat route"
    assert [message["role"] for message in engine.chats()[1]["messages"]] == ["user", "system"]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_parser_reasoning_is_nothing_to_be_quiet_about(
    stub: EngineStub, front: Front, stream: bool
) -> None:
    """vLLM ignores the field then, and gives the ids, the logprobs and no null that it would not have given."""
    body = {"model": "stub", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "stream": stream,
            "include_reasoning": False, "logprobs": True}  # fmt: skip
    direct = await send(stub.url + CHAT, body=body)
    answers = [await send(f"{front.url}/e/x{CHAT}", body=body) for _ in range(2)]
    asked = [request.body for request in stub.llm_requests()]
    assert [steady(answer.body) for answer in answers] == [steady(direct.body)] * 2
    assert [request["max_tokens"] for request in asked] == [9, 1, 9, 9], "one trial"
    assert all(request["include_reasoning"] is False for request in asked)
    assert [len(call.token_ids) for call in front.calls] == [9, 9]


async def test_with_a_parser_the_engine_is_asked_for_the_reasoning() -> None:
    """The engine of this test withholds whatever it is asked."""
    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        choice = {"index": 0, "message": {"content": "a"}, "token_ids": None, "finish_reason": "stop"}
        return web.json_response({"model": "m", "choices": [choice]})

    asked: list[Any] = []
    async with answering(CHAT, answer) as url, Front(url) as front:
        await send(f"{front.url}/e/x{CHAT}", body={"model": "m", "messages": [], "include_reasoning": False})
        await send(f"{front.url}/e/x{CHAT}", body={"model": "m", "messages": []})
    assert [request.get("include_reasoning") for request in asked] == [False, True, None]


async def test_it_is_asked_behind_the_gate() -> None:
    async with EngineStub() as stub, Front(stub.url, hold_s=0.1) as front:
        front.close_gate()
        answer = await ask(front, "stub", **OFF)
        assert answer.status == 503 and not stub.requests


async def test_an_engine_that_is_gone_is_a_502() -> None:
    async with Front("http://127.0.0.1:9") as front:
        answer = await ask(front, **OFF)
    assert answer.status == 502 and answer.json()["error"]["type"] == "api_error"
    assert not front.calls and front.running == 0
