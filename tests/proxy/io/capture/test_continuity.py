"""Turns before an engine that reads history as other tokens than it sampled: exact ids, or a word for why not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy.core.conversation.history import ChatHistory
from ajet_proxy.core.trajectory.timeline import merge
from ajet_sdk.sample import Call
from tests.kit.engine_dialect import Reply
from tests.kit.engine_stub import EngineStub, Fault, Received
from tests.kit.engine_tokens import MAX_MODEL_LEN, decode, encode, render
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, RESPONSES, Front

STUB = {"drift": True}
ROUTES = pytest.mark.parametrize("route", [CHAT, RESPONSES])
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens"}
FUNCTION = {"name": "guess", "parameters": {"type": "object"}}
TOOL, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", "description": "Guess.", **FUNCTION}
PLAYING: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [TOOL]},
    RESPONSES: {
        "tools": [{"type": "web_search"}, {"type": "namespace", "name": "games", "tools": [FLAT]}, FLAT],
        "instructions": "Play.", "store": False,
    },
}
MORE = {"role": "user", "content": "again"}


def said(answer: Answer, *, final: bool = False) -> list[dict[str, Any]]:
    """The part of `answer` that goes into a client's history. The items of a streamed response are kept as its events
    told them, or as its `final` event tells them."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"].startswith("application/json"):
        whole = answer.json()
        items: list[dict[str, Any]] = whole["output"] if "output" in whole else [whole["choices"][0]["message"]]
        return items
    events = [event for event in answer.events() if event != "[DONE]"]
    if "choices" not in events[0]:
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        return events[-1]["response"]["output"] if final else items
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    out: dict[str, Any] = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
    if calls:
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        out["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return [out]


def results(past: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of tools to what the last of `past` calls."""
    calls = past[-1].get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": call["id"], "content": "lower"} for call in calls] or [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "lower"}
        for item in past[-1:] if item.get("type") == "function_call"
    ]


async def turn(
    front: Front, past: list[dict[str, Any]], *, route: str = CHAT, final: bool = False, **body: Any
) -> dict[str, Any]:
    """Ask, and take the answer into the history."""
    body = {"model": "stub", "messages" if route == CHAT else "input": past, **body}
    past += said(await send(f"{front.url}/e/ep{route}", body=body), final=final)
    return past[-1]


async def again(front: Front, past: list[dict[str, Any]], **body: Any) -> str | None:
    """One more turn; the word for it."""
    past.append(dict(MORE))
    await turn(front, past, **body)
    return words(front)[-1]


async def talk(front: Front, turns: int = 2, **body: Any) -> list[dict[str, Any]]:
    """A conversation of so many turns; its history."""
    past: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    await turn(front, past, **body)
    for _ in range(turns - 1):
        await again(front, past, **body)
    return past


def words(front: Front) -> list[str | None]:
    return [call.continuity for call in front.calls]


def whole(call: Call) -> tuple[int, ...]:
    return (*call.prompt_token_ids, *call.token_ids)


def given(request: Received) -> bool:
    return "kv_transfer_params" in (request.body or {})


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(("route", "final"), [(CHAT, False), (RESPONSES, False), (RESPONSES, True)])
async def test_drift_is_zero_with_exact_ids_and_is_not_without(route: str, final: bool, on: bool) -> None:
    """Streamed and not, with calls of tools."""
    continuity = "auto" if on else "off"
    async with EngineStub(drift=True, split_seed=3) as stub, Front(stub.url, continuity=continuity) as front:
        past: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        for number in range(10):
            more = PLAYING[route] | {"stream": number % 3 == 0, "seed": number}
            await turn(front, past, route=route, final=final, **more)
            past += results(past) or [{"role": "user", "content": "say:  higher lower " if number % 2 else "hello"}]
        assert any(results([item]) for item in past)
        assert (len(merge(front.calls)) == 1) is on
        assert words(front) == (["first_turn", *["exact"] * 9] if on else [None] * 10)
        for before, call in zip(front.calls, front.calls[1:], strict=False):
            assert (call.prompt_token_ids[: len(whole(before))] == whole(before)) is on
            assert ("kv_transfer_params" in call.altered) is on
        assert ('ajet_continuity_total{outcome="exact"} 9' in front.metrics.render()) is on


@ROUTES
async def test_an_engine_whose_rendering_is_exact_is_left_alone(route: str) -> None:
    async with EngineStub() as stub, Front(stub.url) as front:
        await talk(front, 3, route=route)
        assert words(front) == ["first_turn", "same", "same"]
        assert not any(map(given, stub.requests))
        assert [request.path for request in stub.requests if request.path == "/tokenize"] == ["/tokenize"] * 2
        assert not any("kv_transfer_params" in call.altered for call in front.calls)


@pytest.mark.parametrize(("route", "asked"), [(CHAT, [None, 1, None]), (RESPONSES, [None, 1, 1, None])])
async def test_a_turn_costs_two_renderings_once_the_engine_is_known(
    stub: EngineStub, front: Front, route: str, asked: list[int | None]
) -> None:
    """Before that come a trial and, for responses, how the route itself renders."""
    past = await talk(front, 2, route=route)
    assert [request.body.get(LIMIT[route]) for request in stub.llm_requests()] == asked
    before = len(stub.requests)
    await again(front, past, route=route)
    assert [request.path for request in stub.requests[before:]] == ["/tokenize", "/tokenize", route]


@pytest.mark.parametrize("continuity", ["auto", "off"])
async def test_the_history_of_a_call_is_read_once(continuity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, init = [], ChatHistory.__init__

    def counted(self: ChatHistory, request: Any, scope: bytes, *, exact: bool) -> None:
        read.append(exact)
        init(self, request, scope, exact=exact)

    monkeypatch.setattr(ChatHistory, "__init__", counted)
    async with EngineStub(drift=True) as stub, Front(stub.url, continuity=continuity) as front:
        front.open("ep", task="t")
        await talk(front, 2)
        await send(front.url + CHAT, body={"model": "stub", "messages": [MORE]}, headers={"X-AJet-Task": "t"})
        assert read == [continuity == "auto"] * 3


async def test_the_answer_is_what_the_engine_says_to_these_ids(stub: EngineStub, front: Front) -> None:
    """The same ids, asked directly, give the same answer: nothing but the prompt was changed."""
    past = await talk(front, 2, seed=4)
    sent = stub.llm_requests()[-1].body
    direct = await send(stub.url + CHAT, body={
        "model": "stub", "messages": past[:3], "seed": 4, "kv_transfer_params": sent["kv_transfer_params"],
    })  # fmt: skip
    assert direct.json()["choices"][0]["message"] == past[-1]


CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 7}}'
CLOSING = "\n</tool_call>"


@pytest.mark.parametrize(("said", "stream", "called", "word"), [
    ("ok higher lo", True, False, "exact"), ("ok higher", False, False, "exact"), (f"ok {CALL}", False, False, "exact"),
    (f"ok {CALL}", True, True, "stop_token"), (f"ok {CALL}{CLOSING}", True, True, "exact"),
    (f"ok {CALL}{CLOSING}", False, True, "exact"),
])  # fmt: skip
async def test_an_answer_cut_at_its_limit_is_read_as_the_template_writes_it(
    front: Front, said: str, stream: bool, called: bool, word: str
) -> None:
    """Its turn is closed. A call that the model left open is closed too, and so no longer the model's; in one piece it
    is told as words."""
    past: list[dict[str, Any]] = [{"role": "user", "content": f"say: {said}{CLOSING} and more"}]
    answer = await turn(front, past, tools=[TOOL], stream=stream, max_tokens=len(encode(said)))
    assert [call["function"]["arguments"] for call in answer.get("tool_calls") or ()] == ['{"number": 7}'] * called
    past += results(past) or [MORE]
    await turn(front, list(past), tools=[TOOL])
    first, second = front.calls
    assert (first.finish_reason, second.continuity) == ("length", word)
    assert decode(first.token_ids, skip_chat_marks=False) == said
    assert decode(second.prompt_token_ids, skip_chat_marks=False) == render(past, [TOOL])
    assert (second.prompt_token_ids[: len(whole(first))] == whole(first)) == (word == "exact")
    assert (len(merge(front.calls)) == 1) == (word == "exact")


async def test_forks_concurrent_turns_and_retries_all_go_on_from_their_call(front: Front) -> None:
    past = await talk(front, 1)
    forks = [[*past, {"role": "user", "content": f"say: lower {name}"}] for name in "abc"]
    await asyncio.gather(*(turn(front, fork) for fork in forks))
    await send(
        front.url + f"/e/ep{CHAT}", body={"model": "stub", "messages": forks[0][:3]},
        headers={"x-stainless-retry-count": "1"},
    )
    first, *rest = front.calls
    assert words(front) == ["first_turn", *["exact"] * 4]
    assert all(call.prompt_token_ids[: len(whole(first))] == whole(first) for call in rest)
    await asyncio.gather(*(again(front, fork) for fork in forks))
    assert words(front)[5:] == ["exact"] * 3


async def test_several_choices_are_each_continued(front: Front) -> None:
    body = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "n": 3}
    answer = await send(front.url + f"/e/ep{CHAT}", body=body)
    for choice, call in zip(answer.json()["choices"], front.calls[:3], strict=True):
        assert await again(front, [*body["messages"], choice["message"]]) == "exact"  # type: ignore[misc]
        assert front.calls[-1].prompt_token_ids[: len(whole(call))] == whole(call)


async def test_after_a_restart_the_next_turn_goes_out_plainly_and_the_one_after_it_exactly(stub: EngineStub) -> None:
    async with Front(stub.url) as front:
        past = await talk(front, 1)
    async with Front(stub.url) as front:
        assert [await again(front, past) for _ in range(2)] == ["unknown_history", "exact"]


# --- where it cannot be proven, it is not done


def strict(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """A template that takes no other words from an assistant than the ones it knows."""
    if any(message["role"] == "assistant" and "higher" not in message["content"] for message in messages):
        raise ValueError("what is this?")
    return render(messages, tools)


def flowing(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """A template without marks around its turns."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def forgetful(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """A template whose tail depends on the last answer."""
    last = [message["content"] for message in messages if message["role"] == "assistant"][-1:]
    return render(messages, tools) + "".join(last)[:1]


async def second_turn(front: Front, **body: Any) -> str | None:
    """The word for the second turn of a conversation."""
    past: list[dict[str, Any]] = [{"role": "user", "content": "say: higher lower"}]
    await turn(front, past, **body)
    return await again(front, past)


@pytest.mark.parametrize(
    ("renderer", "word"), [(strict, "not_rendered"), (flowing, "stop_token"), (forgetful, "no_joint")]
)
async def test_a_template_without_a_joint_that_holds(
    stub: EngineStub, front: Front, renderer: Any, word: str
) -> None:
    stub.renderer = renderer
    assert await second_turn(front) == word
    assert front.calls[-1].altered == ("return_token_ids", "logprobs")


def naming(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """A template that says who speaks."""
    roles = [{**message, "role": f"{message['role']} {message.get('name', '')}"} for message in messages]
    return render(roles, tools)


@pytest.mark.parametrize(("renderer", "word"), [(render, "exact"), (naming, "unknown_history")])
async def test_answers_that_the_client_signs_with_a_name(
    stub: EngineStub, front: Front, renderer: Any, word: str
) -> None:
    stub.renderer = renderer
    past = await talk(front, 1)
    for _ in range(2):
        past[-1]["name"] = "Calculator"
        assert await again(front, past) == word


async def test_a_stop_string(front: Front) -> None:
    assert await second_turn(front, stop=["low"]) == "stop_string"


@ROUTES
async def test_a_prompt_without_room_for_an_answer(front: Front, route: str) -> None:
    past = await talk(front, 1, route=route)
    assert await again(front, past, route=route, **{LIMIT[route]: MAX_MODEL_LEN - 10}) == "too_long"


async def test_what_is_beyond_it(front: Front) -> None:
    await turn(front, [dict(MORE)], echo=True)
    await turn(front, [dict(MORE)], route=RESPONSES, truncation="auto")
    assert words(front) == ["unsupported"] * 2
    await turn(front, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert front.lost == ["multimodal"]


@ROUTES
@pytest.mark.parametrize("ids", ["ignored", "refused"])
async def test_an_engine_that_does_not_read_given_ids_is_found_out_before_it_gets_any(
    stub: EngineStub, front: Front, route: str, ids: Any
) -> None:
    stub.given_ids = ids
    await talk(front, 4, route=route)
    assert words(front) == ["first_turn", *["engine"] * 3]
    asked = [request.body[LIMIT[route]] for request in stub.llm_requests() if given(request)]
    assert asked == [1], "it is asked once, not each turn"


@ROUTES
async def test_an_engine_that_stops_reading_ids_gets_no_more(stub: EngineStub, front: Front, route: str) -> None:
    past = await talk(front, 2, route=route)
    stub.given_ids = "ignored"
    assert [await again(front, past, route=route) for _ in range(2)] == ["ignored", "engine"]
    assert 'ajet_continuity_total{outcome="ignored"} 1' in front.metrics.render()
    assert len(front.calls) == 4 and not front.lost


@ROUTES
async def test_an_engine_that_refuses_the_ids_is_asked_plainly(stub: EngineStub, front: Front, route: str) -> None:
    past = await talk(front, 2, route=route)
    stub.given_ids = "refused"
    assert await again(front, past, route=route) == "refused"
    assert not given(stub.llm_requests()[-1]) and "kv_transfer_params" not in front.calls[-1].altered


async def test_a_tokenize_that_does_not_render_what_the_chat_route_read_is_not_believed(
    stub: EngineStub, front: Front
) -> None:
    past = await talk(front, 1)
    stub.renderer = lambda messages, tools: "today " + render(messages, tools)
    assert await again(front, past) == "not_proven"
    assert await again(front, past) == "exact", "the turn before is rendered as it was now"


@ROUTES
async def test_an_engine_without_tokenize_answers_all_the_same(stub: EngineStub, front: Front, route: str) -> None:
    stub.tokenizes = False
    await talk(front, 2, route=route)
    assert words(front)[-1] == "not_rendered"


@pytest.mark.parametrize(("route", "kind"), [
    (CHAT, "status"), (CHAT, "not_vllm"), (RESPONSES, "status"), (RESPONSES, "no_token_ids"), (RESPONSES, "not_vllm"),
])  # fmt: skip
async def test_an_engine_that_fails_when_it_is_asked_is_asked_again(
    stub: EngineStub, front: Front, route: str, kind: str
) -> None:
    """When it is tried, or about a kind of response that was not seen yet."""
    past = await talk(front, 1 if route == CHAT else 2, route=route)
    past.append({"role": "user" if route == CHAT else "developer", "content": "of another kind"})
    for faults, word in (([Fault(kind)], "not_rendered"), ([], "exact")):
        stub.faults = faults
        await turn(front, list(past), route=route)
        assert words(front)[-1] == word


async def test_a_history_that_is_not_the_calls_is_not_continued(front: Front) -> None:
    past = await talk(front, 1, route=RESPONSES)
    assert await again(front, [dict(MORE), *past[1:]], route=RESPONSES) == "unknown_history"
    past = await talk(front, 1)
    front.store.state.episodes["ep"].transcript.calls[front.calls[-1].call].text = None  # its episode has ended
    assert await again(front, past) == "unknown_history"


class Thinker(EngineStub):
    """An engine that tells reasoning from content, and whose template leaves reasoning out of history. If it `looks`,
    its parser takes reasoning in the prompt's ids for the end of the reasoning to come."""

    looks = True

    async def write(
        self, request: Any, parts: Any, fault: Any, delay: float, content_type: str, length: int | None
    ) -> Any:
        given = (self.requests[-1].body.get("kv_transfer_params") or {}).get("prompt_token_ids") or ()
        seen = b"</think>" in bytes(token for token in given if token < 256)
        parts = list(parts)
        if request.path == CHAT and length is not None:
            parts = [part.replace(b'"<think>hm</think>hello"', b'"hello"') for part in parts]
            parts = [part.replace(b'"reasoning":null', b'"reasoning":"hm"') for part in parts]
            length = sum(map(len, parts))
        elif request.path == CHAT and not (seen and self.looks):
            parts = [part.replace(b'"delta":{"content":', b'"delta":{"reasoning":') for part in parts]
        return await super().write(request, parts, fault, delay, content_type, length)


@pytest.mark.parametrize(
    ("looks", "body", "word"),
    [
        (True, {"stream": True}, "reasoning_parser"),
        (True, {"response_format": {"type": "text"}}, "reasoning_parser"),
        (True, {}, "exact"),
        (False, {"stream": True}, "exact"),
    ],
)
async def test_reasoning_in_the_exact_ids_must_not_mislead_the_engines_parser(
    looks: bool, body: dict[str, Any], word: str
) -> None:
    plain = {name: value for name, value in body.items() if name != "stream"}
    async with Thinker(drift=True) as stub, Front(stub.url) as front:
        stub.looks = looks
        past: list[dict[str, Any]] = [{"role": "user", "content": "say: <think>hm</think>hello"}]
        assert (await turn(front, past, **plain))["reasoning"] == "hm"
        assert await again(front, past, **body) == word
        assert ("kv_transfer_params" in stub.llm_requests()[-1].body) is (word == "exact")


class Nested(EngineStub):
    """An engine whose messages hold something deep."""

    async def write(self, request: web.Request, parts: Any, *how: Any) -> web.StreamResponse:
        deep = b'{"more":' + b'{"a":' * 1200 + b"1" + b"}" * 1200 + b","
        whole = b"".join(parts).replace(b'"message":{', b'"message":' + deep)
        fault, delay, content_type, _ = how
        return await super().write(request, [whole], fault, delay, content_type, len(whole))


async def test_an_answer_that_is_nested_too_deeply_to_be_known_again_is_captured_all_the_same() -> None:
    async with Nested() as stub, Front(stub.url) as front:
        await talk(front, 2)
        assert words(front) == ["first_turn", "unsupported"]
        assert not front.lost


# --- what only responses have


class Odd(EngineStub):
    """An engine whose ``/tokenize`` renders otherwise than its routes."""

    async def tokenize(self, request: web.Request) -> web.Response:
        renderer = self.renderer
        self.renderer = lambda messages, tools: "today " + render(messages, tools)
        try:
            return await super().tokenize(request)
        finally:
            self.renderer = renderer


@pytest.mark.parametrize("drift", [True, False])
async def test_where_tokenize_renders_otherwise_the_route_itself_is_asked(drift: bool) -> None:
    async with Odd(drift=drift) as stub, Front(stub.url) as front:
        past = await talk(front, 2, route=RESPONSES)
        before = len(stub.requests)
        await again(front, past, route=RESPONSES, stream=True)
        assert words(front) == ["first_turn", *["exact" if drift else "same"] * 2]
        assert [request.path for request in stub.requests[before:]] == [RESPONSES] * (3 if drift else 2)
        asked = [request.body for request in stub.requests[before:-1]]
        assert all((body["max_output_tokens"], body["store"]) == (1, False) for body in asked)
        assert len(merge(front.calls)) == 1


async def test_a_response_that_names_the_one_before_goes_on_from_it() -> None:
    """With its calls too, which the engine leaves out of what it renders."""
    async with EngineStub(drift=True, kept={}) as stub, Front(stub.url) as front:

        async def ask(items: Any, **more: Any) -> Any:
            body = {"model": "stub", "input": items, "tools": [FLAT], **more}
            answer = await send(f"{front.url}/e/ep{RESPONSES}", body=body)
            return answer.events()[-1]["response"] if "stream" in more else answer.json()

        first = await ask("hi")
        called = [results([item])[0] for item in first["output"] if item["type"] == "function_call"]
        second = await ask(called, previous_response_id=first["id"], stream=True)
        await ask("say: higher", previous_response_id=second["id"])
        assert called and words(front) == ["first_turn", "exact", "exact"]
        assert len(merge(front.calls)) == 1
        assert stub.llm_requests()[-1].body["previous_response_id"] == second["id"]


async def test_a_response_that_the_engine_does_not_keep_is_the_engines_to_refuse(front: Front) -> None:
    body = {"model": "stub", "input": "more", "previous_response_id": "resp_1"}
    assert (await send(front.url + f"/e/ep{RESPONSES}", body=body)).status == 404
    assert (words(front), front.lost) == ([], ["refused"])


class Deaf(EngineStub):
    """An engine that reads given ids on its chat route alone, as vLLM does for gpt-oss."""

    def _reply(self, path: str, body: dict[str, Any], kind: str) -> Reply:
        return EngineStub._reply(self, path, body | ({"kv_transfer_params": None} if path == RESPONSES else {}), kind)


async def test_an_engine_may_read_ids_on_one_route_and_not_on_the_other() -> None:
    async with Deaf(drift=True) as stub, Front(stub.url) as front:
        await talk(front, 2, route=RESPONSES)
        await talk(front, 2)
        assert words(front) == ["first_turn", "engine", "first_turn", "exact"]
