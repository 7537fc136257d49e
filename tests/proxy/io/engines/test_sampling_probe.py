"""Questions how engines sample of themselves are asked once for each model, when a call was captured, and cost no
agent much."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet_proxy.core.protocol.sampling import OFF
from ajet_proxy.io.engines import probe
from tests.kit.engine_sampling import Sampling
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.ports import free_port
from tests.kit.wire import Answer, send
from tests.proxy.io.capture.test_relay import ONE_CALL
from tests.proxy.io.front import CHAT, COMPLETIONS, RESPONSES, Front, later, leave, until

pytestmark = pytest.mark.usefixtures("flying")

QUESTIONS, MORE = 7, 3
UNSTATED = dict.fromkeys(OFF)


async def ask(front: Front, route: str = CHAT, **more: Any) -> Answer:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    if route in (COMPLETIONS, RESPONSES):
        said = {"prompt": "hi", "max_tokens": 9} if route == COMPLETIONS else {"input": "hi"}
    return await send(f"{front.url}/e/x{route}", body={"model": "stub", **said, **more})


def told(front: Front) -> list[Any]:
    """The sampling of each call."""
    return [call.sampling for call in front.calls]


async def test_an_engine_is_asked_once_and_what_it_says_counts_for_all_calls() -> None:
    async with EngineStub(sampling=Sampling({"temperature": 0.7, "top_k": 20})) as stub, Front(stub.url) as front:
        await ask(front)
        assert len(stub.sampling.asked) == QUESTIONS
        await ask(front, stream=True)
        await ask(front, COMPLETIONS, temperature=1, top_p=0.9)
        await ask(front, "/v1/messages", top_k=0)
        await ask(front, RESPONSES, temperature=0, seed=7)
        assert len(stub.sampling.asked) == QUESTIONS
        assert [request.path for request in stub.llm_requests()] == [
            CHAT, CHAT, COMPLETIONS, CHAT, RESPONSES,
        ]
    raw = {"logprobs": "raw"}
    assert told(front) == [
        *[raw | {"temperature": 0.7, "top_k": 20}] * 2, raw | {"top_k": 20, "top_p": 0.9},
        raw | {"temperature": 0.7}, raw | {"temperature": 0, "seed": 7},
    ]


async def test_calls_that_come_at_once_ask_together() -> None:
    may = asyncio.Event()
    async with EngineStub(sampling=Sampling(processed=True, may=may)) as stub, Front(stub.url) as front:
        asking = asyncio.gather(*(ask(front, n=2) for _ in range(5)))
        await asyncio.sleep(0.05)
        may.set()
        await asking
        assert len(stub.sampling.asked) == QUESTIONS
    assert told(front) == [{"logprobs": "processed"}] * 10


async def test_it_is_asked_in_the_clients_name() -> None:
    async with EngineStub() as stub, Front(stub.url, upstream_key="theirs") as front:
        await ask(front)
        assert stub.llm_requests()[0].headers["authorization"] == "Bearer theirs"
    assert told(front) == [{"logprobs": "raw"}]


@pytest.mark.parametrize("kind", ["no_token_ids", "no_logprobs", "refuses_ids", "status"])
async def test_an_engine_of_which_nothing_is_captured_is_never_asked(stub: EngineStub, front: Front, kind: str) -> None:
    stub.faults.append(Fault(kind, times=9))
    for stream in (False, True):
        await ask(front, stream=stream)
    assert stub.sampling.asked == []
    assert not front.calls and len(front.lost) == 2


async def test_an_engine_that_refuses_is_not_asked_again() -> None:
    async with EngineStub(sampling=Sampling(status=404)) as stub, Front(stub.url) as front:
        for more in ({}, {"temperature": 0.5, "top_p": 1}):
            assert (await ask(front, **more)).status == 200
        assert len(stub.sampling.asked) == QUESTIONS
    del (named := UNSTATED | {"temperature": 0.5})["top_p"]
    assert told(front) == [UNSTATED | {"logprobs": "unknown"}, named | {"logprobs": "unknown"}]


@pytest.mark.parametrize(("defaults", "expected"), [
    ({}, {}), ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
    ({"top_k": 20}, {"top_k": None, "min_p": None}), ({"min_p": 0.05}, {"top_k": None, "min_p": None}),
    ({"repetition_penalty": 1.02}, {"repetition_penalty": None}),
    ({"repetition_penalty": 0.98}, {"repetition_penalty": None}),
    ({"temperature": 0, "presence_penalty": 0.5}, {"temperature": 0, "presence_penalty": 0.5}),
])  # fmt: skip
@pytest.mark.parametrize("processed", [False, True])
async def test_an_engine_without_render_routes_shows_which_defaults_are_off(
    defaults: dict[str, float], expected: dict[str, Any], processed: bool
) -> None:
    sampling = Sampling(defaults, renders=False, processed=processed)
    async with EngineStub(sampling=sampling) as stub, Front(stub.url) as front:
        for _ in range(2):
            await ask(front)
        assert len(sampling.asked) == QUESTIONS + MORE
    assert told(front) == [{"logprobs": "processed" if processed else "raw", **expected}] * 2


@pytest.mark.parametrize("silent", [True, False])
async def test_a_silent_or_busy_engine_costs_little_and_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    sampling = Sampling(may=asyncio.Event()) if silent else Sampling(status=503)
    monkeypatch.setattr(probe, "LIMIT_S", 0.5)
    monkeypatch.setattr(probe, "RETRY_S", 3600.0)
    async with EngineStub(sampling=sampling) as stub, Front(stub.url) as front:
        for _ in range(2):
            assert (await ask(front)).status == 200
        assert len(stub.sampling.asked) == QUESTIONS, "not for each call"
        sampling.may, sampling.status = None, 200
        monkeypatch.setattr(probe, "LIMIT_S", 300.0)
        await later(monkeypatch, 3601.0)
        while not told(front)[3:] or told(front)[-1]["logprobs"] == "unknown":
            await ask(front)
        assert len(stub.sampling.asked) == 2 * QUESTIONS
    assert told(front)[:-1] == [UNSTATED | {"logprobs": "unknown"}] * (len(front.calls) - 1), "nobody waits once more"
    assert told(front)[-1] == {"logprobs": "raw"}


async def test_an_engine_that_says_odd_things_of_itself_costs_no_call(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(answers: object) -> None:
        raise TypeError("unhashable")

    monkeypatch.setattr(probe.sampling, "known", odd)
    for _ in range(2):
        assert (await ask(front)).status == 200
    assert told(front) == [UNSTATED | {"logprobs": "unknown"}] * 2


async def test_the_first_calls_wait_for_what_a_slow_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE_S", 0.1)
    may = asyncio.Event()
    async with EngineStub(sampling=Sampling(may=may)) as stub, Front(stub.url) as front:
        asking = asyncio.gather(*(ask(front) for _ in range(4)))
        await asyncio.sleep(0.5)
        may.set()
        await asking
        await ask(front)
        assert len(stub.sampling.asked) == QUESTIONS
    assert told(front) == [{"logprobs": "raw"}] * 5


@pytest.mark.parametrize("opens", [True, False])
async def test_questions_wait_at_the_gate_or_end_with_the_front(monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
    """While weights change only what is under way may go on. What an engine says later counts once it is there."""
    monkeypatch.setattr(probe, "PATIENCE_S", 0.1)
    async with EngineStub() as stub, Front(stub.url) as front:
        stub.paused.clear()
        asking = asyncio.create_task(ask(front))
        await until(lambda: front.running)
        front.close_gate()
        stub.paused.set()
        assert (await asking).status == 200
        assert stub.sampling.asked == []
        if opens:
            front.open_gate(1)
            await until(lambda: len(stub.sampling.asked) == QUESTIONS)
            await ask(front)
    assert told(front) == [UNSTATED | {"logprobs": "unknown"}, *[{"logprobs": "raw"}] * opens]


async def test_an_engine_that_came_back_is_asked_again() -> None:
    port = free_port()
    async with Front(f"http://127.0.0.1:{port}") as front:
        async with EngineStub(port=port, sampling=Sampling({"top_p": 0.5})):
            await ask(front)
        assert (await ask(front)).status == 502
        async with EngineStub(port=port, sampling=Sampling(processed=True)):
            await ask(front)
    assert told(front) == [{"logprobs": "raw", "top_p": 0.5}, {"logprobs": "processed"}]


async def test_other_engines_are_asked_anew_and_new_weights_are_no_reason() -> None:
    async with EngineStub() as one, EngineStub(sampling=Sampling({"min_p": 0.5})) as two, Front(one.url) as front:
        await ask(front)
        for version, engine in ((1, one), (2, one), (3, two)):
            front.announce("stub", version, engine.url)
            await ask(front)
        assert (len(one.sampling.asked), len(two.sampling.asked)) == (QUESTIONS, QUESTIONS)
    assert told(front) == [{"logprobs": "raw"}] * 3 + [{"logprobs": "raw", "min_p": 0.5}]


async def test_a_call_whose_logprobs_were_asked_for_has_those_of_the_model() -> None:
    tool = {"type": "function", "name": "guess", "parameters": {"type": "object"}}
    said = {"input": f"say: {ONE_CALL}", "tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
    async with EngineStub(sampling=Sampling(processed=True)) as stub, Front(stub.url) as front:
        await ask(front, RESPONSES, **said)
        await ask(front, RESPONSES)
    assert ["scored_logprobs" in call.altered for call in front.calls] == [True, False]
    assert told(front) == [{"logprobs": "scored", "structured": "tools"}, {"logprobs": "processed"}]


async def test_a_client_that_leaves_meanwhile_loses_its_call_and_the_questions_go_on() -> None:
    may = asyncio.Event()
    async with EngineStub(sampling=Sampling(may=may)) as stub, Front(stub.url) as front:
        gone = asyncio.create_task(ask(front))
        await until(lambda: stub.sampling.asked)
        await leave(gone)
        await until(lambda: front.lost)
        may.set()
        await ask(front)
        assert len(stub.sampling.asked) == QUESTIONS
    assert front.lost == ["disconnected"] and told(front) == [{"logprobs": "raw"}]
