"""Rendering, as a process finds it out where another process has begun the conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.continuity.memory import outline
from ajet_proxy.core.conversation.history import ChatHistory
from ajet_proxy.io.engines.rendering import NotRendered, Renderer, Renderings
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.engines.vllm import Vllm
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.capture.test_continuity import MORE, TOOL, talk, turn, words
from tests.proxy.io.front import CHAT, Front


class Second(Front):
    """The front of another process, which shares its ledger_port with the `first` one."""

    remote = False

    def __init__(self, first: Front, *upstreams: str, **settings: Any) -> None:
        super().__init__(*upstreams, **settings)
        ledger = first.store.state
        engines = Engines(self.fixed, ledger.weights.upstreams, ledger.weights.models)
        self.front = self._make(ledger_port=first.ledger_port, engines=engines)


async def test_a_process_that_has_only_seen_exact_turns_asks_the_chat_route_once() -> None:
    async with (
        EngineStub(drift=True) as stub, Front(stub.url, gate_mode="pause") as front,
        Second(front, stub.url, gate_mode="pause") as second,
    ):  # fmt: skip
        front.open_gate(3)
        body: dict[str, Any] = {"tools": [TOOL], "tool_choice": "none", "seed": 7, "cache_salt": "mine"}
        messages = await talk(front, 2, **body)
        for _ in range(2):
            messages.append(dict(MORE))
            await turn(second, messages, **body)
        assert words(front) == ["first_turn", *["exact"] * 3]
        asked = [r.body for r in stub.requests if r.path == CHAT and r.body.get("max_tokens") == 1]
        assert [sorted(question) for question in asked if "tools" in question] == [
            ["cache_salt", "max_tokens", "messages", "model", "return_token_ids", "tool_choice", "tools"]
        ]
        salts = {r.body["cache_salt"] for r in stub.requests if r.path == CHAT and "tools" in r.body}
        assert salts == {"mine#3.0"}, "what is asked about a turn fills the prefix cache for it"


class Odd(EngineStub):
    """An engine whose /tokenize comes to render otherwise than its chat route."""

    is_odd = False

    def rendered(self, body: dict[str, Any]) -> list[int]:
        ids = super().rendered(body)
        return [1, *ids] if self.is_odd and "max_tokens" not in body else ids


async def test_a_process_that_has_only_seen_exact_turns_believes_no_other_rendering() -> None:
    async with Odd(drift=True) as stub, Front(stub.url) as front, Second(front, stub.url) as second:
        messages = await talk(front, 2)
        stub.is_odd = True
        messages.append(dict(MORE))
        await turn(second, messages)
        assert words(front)[-1] == "not_proven"


@pytest.mark.parametrize(("body", "status", "ids"), [
    ({"tokens": [1, 2], "max_model_len": 9}, 200, (1, 2)), ({"tokens": []}, 200, ()), ({}, 200, None),
    ({"tokens": None}, 200, None), ({"tokens": "12"}, 200, None), ({"tokens": [1, -2]}, 200, None), ([], 200, None),
    ({"tokens": [1, 2]}, 404, None),
])  # fmt: skip
async def test_what_is_no_rendering_is_not_taken_for_one(body: Any, status: int, ids: tuple[int, ...] | None) -> None:
    fields = {"messages": [{"role": "user", "content": "hi"}]}
    outlined = outline(fields, ChatHistory(fields, b"", exact=True), episode="e", model="m", agent="")
    assert outlined is not None

    async def ask(method: str, route: str, asked: Any) -> tuple[int, bytes]:
        return status, json.dumps(body).encode()

    renderer = Renderer(Vllm(ask), "m", Renderings(), CHAT, outlined)
    if ids is not None:
        assert await renderer.whole() == ids
        return
    with pytest.raises(NotRendered):
        await renderer.whole()
