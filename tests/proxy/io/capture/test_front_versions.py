"""Which weights sampled which token: by the engine's word where it has one, else by what was read around the call."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from ajet_sdk.sample import Call
from tests.kit.engine_stub import EngineStub, Received
from tests.kit.wire import send
from tests.proxy.io.front import CHAT, COMPLETIONS, Front, until

pytestmark = pytest.mark.usefixtures("flying")

TEXT = "one two three four five six"
BODY: dict[str, dict[str, Any]] = {
    CHAT: {"model": "stub", "messages": [{"role": "user", "content": f"say: {TEXT}"}]},
    COMPLETIONS: {"model": "stub", "prompt": f"say: {TEXT}"},
}


async def ask(front: Front, path: str = CHAT, **more: Any) -> bytes:
    answer = await send(front.url + "/e/ep" + path, body=BODY[path] | {"max_tokens": 24} | more)
    assert answer.status == 200, answer.body
    return answer.body


def asked(request: Received) -> bool:
    return "return_weight_versions" in request.body


async def through_a_change(front: Front, stub: EngineStub, *, stream: bool, label: str | None) -> Call:
    """A call during which other weights come: after some of its 24 events, or before its one answer."""

    def change() -> None:
        stub.label = label
        front.open_gate(1)

    if stream:
        stub.delay_s, body = 0.05, BODY[CHAT] | {"max_tokens": 24, "stream": True}
        async with aiohttp.ClientSession() as client, client.post(f"{front.url}/e/ep{CHAT}", json=body) as answer:
            for _ in range(4):
                await answer.content.readuntil(b"\n\n")
            change()
            await answer.content.read()
    else:
        stub.paused.clear()
        before = len(stub.llm_requests())
        running = asyncio.create_task(ask(front))
        await until(lambda: len(stub.llm_requests()) > before)
        change()
        stub.paused.set()
        await running
    return front.calls[-1]


async def test_a_call_that_names_no_model_is_the_only_ones(stub: EngineStub, front: Front) -> None:
    front.announce("stub", 5, stub.url)
    body = {name: value for name, value in BODY[CHAT].items() if name != "model"}
    assert (await send(front.url + "/e/ep" + CHAT, body=body)).status == 200
    (call,) = front.calls
    assert (call.model, call.policy_versions) == ("stub", ((5, len(call.token_ids)),))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_is_asked_once_it_has_shown_that_it_can_tell(path: str, stream: bool) -> None:
    async with EngineStub(label="0") as stub, Front(stub.url) as front:
        for _ in range(2):
            seen = await ask(front, path, stream=stream)
            assert b'"weight_versions":null' in seen and b'"version"' not in seen
        await ask(front, path, stream=stream, return_weight_versions=True)
        assert [asked(request) for request in stub.llm_requests()] == [False, True, True]
        assert ["return_weight_versions" in call.altered for call in front.calls] == [False, True, False]
        assert all(call.policy_versions[0][0] == 0 and not call.version_uncertain for call in front.calls)


async def test_who_asks_sees_what_the_engine_says() -> None:
    async with EngineStub(label="0") as stub, Front(stub.url) as front:
        for _ in range(2):
            told = json.loads(await ask(front, return_weight_versions=True))["choices"][0]
            (call,) = front.calls[-1:]
            assert told["weight_versions"] == [{"version": "0", "start": 0, "end": len(call.token_ids)}]


async def test_an_engine_that_cannot_tell_is_not_asked(stub: EngineStub, front: Front) -> None:
    assert b"weight_versions" not in await ask(front) + await ask(front)
    assert not any(map(asked, stub.llm_requests()))


@pytest.mark.parametrize("label", ["1", None])
async def test_a_stream_over_a_change_is_told_apart_by_the_engine_or_by_time_and_then_marked(label: str | None) -> None:
    async with EngineStub(label=label and "0") as stub, Front(stub.url) as front:
        await ask(front)
        call = await through_a_change(front, stub, stream=True, label=label)
        (one, before), (two, after) = call.policy_versions
        assert (one, two, before + after) == (0, 1, len(call.token_ids))
        assert call.version_uncertain is (label is None)


async def test_an_answer_in_one_piece_over_a_change_counts_as_the_older_weights_and_is_marked(
    stub: EngineStub, front: Front
) -> None:
    call = await through_a_change(front, stub, stream=False, label=None)
    assert (call.policy_versions, call.version_uncertain) == (((0, len(call.token_ids)),), True)


async def test_labels_that_are_not_the_trainers_versions_are_no_versions() -> None:
    async with EngineStub(label="default") as stub, Front(stub.url) as front:
        await ask(front)
        front.open_gate(5)
        await ask(front)
        stub.label = "2"
        await ask(front)
        found = [(call.policy_versions[0][0], call.version_uncertain) for call in front.calls]
        assert found == [(0, False), (5, False), (5, True)]
