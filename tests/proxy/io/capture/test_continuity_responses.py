"""Turns of ``/v1/responses`` before an engine that reads history as other tokens than it sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy.core.trajectory.timeline import merge
from tests.kit.engine_dialect import Reply
from tests.kit.engine_stub import EngineStub, Fault, Received
from tests.kit.engine_tokens import MAX_MODEL_LEN, render
from tests.kit.wire import Answer, send
from tests.proxy.io.capture.test_continuity import talk as chat
from tests.proxy.io.capture.test_continuity import whole, words
from tests.proxy.io.front import Front

ROUTE = "/v1/responses"
TOOL = {"type": "function", "name": "guess", "description": "Guess.", "parameters": {"type": "object"}}
GAMES = {"type": "namespace", "name": "games", "tools": [TOOL]}
MORE = {"role": "user", "content": [{"type": "input_text", "text": "again"}]}
FIRST = {"role": "user", "content": "say: higher"}


def said(answer: Answer, *, final: bool = False) -> dict[str, Any]:
    """The response; of a stream, with the items that its events told, which is what some clients keep, or as its
    `final` event tells it."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"].startswith("application/json"):
        response: dict[str, Any] = answer.json()
        return response
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return events[-1]["response"] | ({} if final else {"output": items})


async def turn(front: Front, items: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """Ask, and take the answer into the history."""
    response = said(await send(front.url + f"/e/ep{ROUTE}", body={"model": "stub", "input": items, **body}))
    items += response["output"]
    return response


async def talk(front: Front, turns: int = 2, **body: Any) -> list[dict[str, Any]]:
    """A conversation of so many turns; its history."""
    items: list[dict[str, Any]] = [dict(FIRST)]
    for number in range(turns):
        if number:
            items.append(dict(MORE))
        await turn(front, items, **body)
    return items


def given(request: Received) -> bool:
    return "kv_transfer_params" in request.body


@pytest.mark.parametrize("final", [False, True], ids=["events", "end"])
async def test_drift_is_zero_with_exact_ids_and_is_not_without(final: bool) -> None:
    """Streamed and not, with calls of tools; the client keeps a stream's items as its events told them, or its end."""
    async with EngineStub(drift=True, split_seed=3) as stub:
        for on in (True, False):
            async with Front(stub.url, continuity="auto" if on else "off") as front:
                items: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
                for number in range(10):
                    body = {"input": items, "model": "stub", "stream": number % 3 == 0, "seed": number}
                    answer = await send(front.url + f"/e/ep{ROUTE}", body=body | {
                        "tools": [{"type": "web_search"}, GAMES, TOOL], "instructions": "Play.", "store": False,
                    })  # fmt: skip
                    output = said(answer, final=final)["output"]
                    items += output
                    results = [
                        {"type": "function_call_output", "call_id": item["call_id"], "output": "lower"}
                        for item in output if item["type"] == "function_call"
                    ]
                    items += results or [{"role": "user", "content": "say:  higher lower " if number % 2 else "hello"}]
                assert any(item.get("type") == "function_call_output" for item in items)
                assert words(front) == (["first_turn", *["exact"] * 9] if on else [None] * 10)
                assert (len(merge(front.calls)) == 1) is on
                for before, call in zip(front.calls, front.calls[1:], strict=False):
                    assert (call.prompt_token_ids[: len(whole(before))] == whole(before)) is on
                    assert ("kv_transfer_params" in call.altered) is on


async def test_an_engine_whose_rendering_is_exact_is_left_alone(stub: EngineStub, front: Front) -> None:
    await talk(front, 3)
    assert words(front) == ["first_turn", "same", "same"]
    assert not any(map(given, stub.llm_requests()))
    assert [request.path for request in stub.requests if request.path != ROUTE] == ["/tokenize"] * 2


async def test_a_turn_costs_two_renderings_once_its_kind_is_known() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        items = await talk(front, 2)
        asked = [request.body.get("max_output_tokens") for request in stub.llm_requests()]
        assert asked == [None, 1, 1, None], "a trial, and how the route itself renders"
        before = len(stub.requests)
        items.append(dict(MORE))
        await turn(front, items)
        assert [request.path for request in stub.requests[before:]] == ["/tokenize", "/tokenize", ROUTE]


class Odd(EngineStub):
    """An engine whose ``/tokenize`` renders otherwise than its routes."""

    async def _tokenize(self, request: web.Request) -> web.Response:
        renderer = self.renderer
        self.renderer = lambda messages, tools: "today " + render(messages, tools)
        try:
            return await super()._tokenize(request)
        finally:
            self.renderer = renderer


@pytest.mark.parametrize("drift", [True, False])
async def test_where_tokenize_renders_otherwise_the_route_itself_is_asked(drift: bool) -> None:
    async with Odd(drift=drift) as stub, Front(stub.url) as front:
        items = await talk(front, 2)
        before = len(stub.requests)
        items.append(dict(MORE))
        await turn(front, items, stream=True)
        assert words(front) == ["first_turn", *["exact" if drift else "same"] * 2]
        assert [request.path for request in stub.requests[before:]] == [ROUTE] * (3 if drift else 2)
        asked = [request.body for request in stub.requests[before:-1]]
        assert all((body["max_output_tokens"], body["store"]) == (1, False) for body in asked)
        assert len(merge(front.calls)) == 1


async def test_a_response_that_names_the_one_before_goes_on_from_it() -> None:
    """With its calls too, which the engine leaves out of what it renders."""
    async with EngineStub(drift=True, kept={}) as stub, Front(stub.url) as front:
        first = await turn(front, [{"role": "user", "content": "hi"}], tools=[TOOL])
        calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "lower"} for call in calls]
        second = await turn(front, results, tools=[TOOL], previous_response_id=first["id"], stream=True)
        await turn(front, [dict(FIRST)], tools=[TOOL], previous_response_id=second["id"])
        assert calls and words(front) == ["first_turn", "exact", "exact"]
        assert len(merge(front.calls)) == 1
        assert stub.llm_requests()[-1].body["previous_response_id"] == second["id"]


async def test_a_response_that_the_engine_does_not_keep_is_the_engines_to_refuse() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        first = await turn(front, [dict(FIRST)])
        body = {"model": "stub", "input": "more", "previous_response_id": first["id"]}
        assert (await send(front.url + f"/e/ep{ROUTE}", body=body)).status == 404
        assert (words(front), front.lost) == (["first_turn"], ["refused"])


# --- where it cannot be proven, it is not done


async def test_an_engine_that_does_not_read_given_ids_is_found_out_before_it_gets_any() -> None:
    for ids in ("ignored", "refused"):
        async with EngineStub(drift=True, given_ids=ids) as stub, Front(stub.url) as front:  # type: ignore[arg-type]
            await talk(front, 3)
            assert words(front) == ["first_turn", "engine", "engine"]
            assert [request.body["max_output_tokens"] for request in stub.llm_requests() if given(request)] == [1]


class Deaf(EngineStub):
    """An engine that reads given ids on its chat route alone, as vLLM does for gpt-oss."""

    def _reply(self, path: str, body: dict[str, Any], kind: str) -> Reply:
        return EngineStub._reply(self, path, body | ({"kv_transfer_params": None} if path == ROUTE else {}), kind)


async def test_an_engine_may_read_ids_on_one_route_and_not_on_the_other() -> None:
    async with Deaf(drift=True) as stub, Front(stub.url) as front:
        await talk(front, 2)
        await chat(front, 2)
        assert words(front) == ["first_turn", "engine", "first_turn", "exact"]


async def test_an_engine_that_stops_reading_ids_gets_no_more_on_this_route() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        items = await talk(front, 2)
        stub.given_ids = "ignored"
        for word in ("ignored", "engine"):
            items.append(dict(MORE))
            await turn(front, items)
            assert words(front)[-1] == word
        assert len(front.calls) == 4 and not front.lost


async def test_an_engine_that_refuses_the_ids_is_asked_plainly() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        items = await talk(front, 2)
        stub.given_ids = "refused"
        await turn(front, [*items, MORE])
        assert words(front)[-1] == "refused"
        assert not given(stub.llm_requests()[-1])


async def test_without_tokenize_or_room_or_a_known_beginning_it_goes_out_as_it_came() -> None:
    async with EngineStub(drift=True, tokenizes=False) as stub, Front(stub.url) as front:
        await talk(front, 2)
        assert words(front)[-1] == "not_rendered"
        stub.tokenizes = True
        await turn(front, [*await talk(front, 1), MORE], max_output_tokens=MAX_MODEL_LEN - 10)
        assert words(front)[-1] == "too_long"
        await turn(front, [dict(MORE), *(await talk(front, 1))[1:], MORE])
        assert words(front)[-1] == "unknown_history"
        await turn(front, [dict(MORE)], truncation="auto")
        assert words(front)[-1] == "unsupported"


@pytest.mark.parametrize("kind", ["status", "no_token_ids", "not_vllm"])
async def test_an_engine_that_fails_when_it_is_asked_is_asked_again(kind: str) -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        items = await talk(front, 2)
        items.append({"role": "developer", "content": "of another kind"})
        for fault, word in ((Fault(kind), "not_rendered"), (None, "exact")):
            stub.faults = [fault] if fault else []
            await turn(front, list(items))
            assert words(front)[-1] == word
