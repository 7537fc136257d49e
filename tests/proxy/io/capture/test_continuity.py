"""Turns before an engine that reads history as other tokens than it sampled: exact ids, or a word for why not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from ajet_proxy.core.conversation.history import ChatHistory
from ajet_proxy.core.trajectory.timeline import merge
from ajet_sdk.sample import Call
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.engine_tokens import MAX_MODEL_LEN, decode, encode, render
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, Front

TOOL = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
MORE = {"role": "user", "content": "again"}


def said(answer: Answer) -> dict[str, Any]:
    """The assistant's message as a client puts it together."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"].startswith("application/json"):
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    out: dict[str, Any] = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
    if calls:
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        out["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return out


async def turn(front: Front, messages: list[dict[str, Any]], *, episode: str = "ep", **body: Any) -> dict[str, Any]:
    """Ask, and take the answer into the history."""
    answer = await send(front.url + f"/e/{episode}{CHAT}", body={"model": "stub", "messages": messages, **body})
    messages.append(said(answer))
    return messages[-1]


async def talk(front: Front, turns: int = 2, **body: Any) -> list[dict[str, Any]]:
    """A conversation of so many turns; its history."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for number in range(turns):
        if number:
            messages.append(dict(MORE))
        await turn(front, messages, **body)
    return messages


def words(front: Front) -> list[str | None]:
    return [call.continuity for call in front.calls]


def whole(call: Call) -> tuple[int, ...]:
    return (*call.prompt_token_ids, *call.token_ids)


async def test_drift_is_zero_with_exact_ids_and_is_not_without() -> None:
    async with EngineStub(drift=True, split_seed=3) as stub:
        for on, timelines in ((True, 1), (False, 10)):
            async with Front(stub.url, continuity="auto" if on else "off") as front:
                messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
                for number in range(10):
                    answer = await turn(front, messages, tools=[TOOL], stream=number % 3 == 0, seed=number)
                    messages += [
                        {"role": "tool", "tool_call_id": call["id"], "content": "lower"}
                        for call in answer.get("tool_calls") or ()
                    ]
                    if messages[-1] is answer:
                        messages.append({"role": "user", "content": "say:  higher lower " if number % 2 else "hello"})
                assert len(merge(front.calls)) == timelines
                expected = ["first_turn", *["exact"] * 9] if on else [None] * 10
                assert words(front) == expected
                for before, call in zip(front.calls, front.calls[1:], strict=False):
                    assert (call.prompt_token_ids[: len(whole(before))] == whole(before)) is on
                    assert ("kv_transfer_params" in call.altered) is on
                assert ('ajet_continuity_total{outcome="exact"} 9' in front.metrics.render()) is on


async def test_an_engine_whose_rendering_is_exact_is_left_alone(stub: EngineStub, front: Front) -> None:
    await talk(front, 3)
    assert words(front) == ["first_turn", "same", "same"]
    assert all("kv_transfer_params" not in (request.body or {}) for request in stub.requests)
    assert [request.path for request in stub.requests if request.path == "/tokenize"] == ["/tokenize"] * 2
    assert all(call.altered == ("return_token_ids", "logprobs") for call in front.calls)


async def test_a_turn_costs_two_renderings_once_the_engine_is_known() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = await talk(front, 2)
        before = len(stub.requests)
        messages.append(dict(MORE))
        await turn(front, messages)
        assert [request.path for request in stub.requests[before:]] == ["/tokenize", "/tokenize", CHAT]


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


async def test_the_answer_is_what_the_engine_says_to_these_ids() -> None:
    """The same ids, asked directly, give the same answer: nothing but the prompt was changed."""
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = await talk(front, 2, seed=4)
        sent = stub.llm_requests()[-1].body
        direct = await send(stub.url + CHAT, body={
            "model": "stub", "messages": messages[:3], "seed": 4, "kv_transfer_params": sent["kv_transfer_params"],
        })  # fmt: skip
        assert direct.json()["choices"][0]["message"] == messages[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_at_its_limit_is_continued(stream: bool) -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "say: higher lower"}]
        await turn(front, messages, max_tokens=9, stream=stream)
        assert messages[-1]["content"] == "higher lo"
        await turn(front, [*messages, MORE])
        first, second = front.calls
        assert (first.finish_reason, second.continuity) == ("length", "exact")
        assert len(merge(front.calls)) == 1


CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 7}}'
CLOSING = "\n</tool_call>"


@pytest.mark.parametrize(("said", "stream", "called", "word"), [
    ("ok higher", True, False, "exact"), (f"ok {CALL}", False, False, "exact"),
    (f"ok {CALL}", True, True, "stop_token"), (f"ok {CALL}{CLOSING}", True, True, "exact"),
    (f"ok {CALL}{CLOSING}", False, True, "exact"),
])  # fmt: skip
async def test_an_answer_cut_at_its_limit_is_read_as_the_template_writes_it(
    said: str, stream: bool, called: bool, word: str
) -> None:
    """Its turn is closed. A call that the model left open is closed too, and so no longer the model's; in one piece it
    is told as words."""
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"say: {said}{CLOSING} and more"}]
        answer = await turn(front, messages, tools=[TOOL], stream=stream, max_tokens=len(encode(said)))
        assert [call["function"]["arguments"] for call in answer.get("tool_calls") or ()] == ['{"number": 7}'] * called
        more = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "no"} if called else MORE
        await turn(front, [*messages, more], tools=[TOOL])
        first, second = front.calls
        assert (first.finish_reason, second.continuity) == ("length", word)
        assert decode(first.token_ids, skip_chat_marks=False) == said
        assert decode(second.prompt_token_ids, skip_chat_marks=False) == render([*messages, more], [TOOL])
        assert (second.prompt_token_ids[: len(whole(first))] == whole(first)) == (word == "exact")


async def test_forks_concurrent_turns_and_retries_all_go_on_from_their_call() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = [{"role": "user", "content": "say: higher"}]
        await turn(front, messages)
        forks = [[*messages, {"role": "user", "content": f"say: lower {name}"}] for name in "abc"]
        await asyncio.gather(*(turn(front, fork) for fork in forks))
        await send(
            front.url + f"/e/ep{CHAT}", body={"model": "stub", "messages": forks[0][:3]},
            headers={"x-stainless-retry-count": "1"},
        )
        first, *rest = front.calls
        assert words(front) == ["first_turn", *["exact"] * 4]
        assert all(call.prompt_token_ids[: len(whole(first))] == whole(first) for call in rest)
        await asyncio.gather(*(turn(front, [*fork, MORE]) for fork in forks))
        assert words(front)[5:] == ["exact"] * 3


async def test_several_choices_are_each_continued() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        body = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "n": 3}
        answer = await send(front.url + f"/e/ep{CHAT}", body=body)
        for choice, call in zip(answer.json()["choices"], front.calls[:3], strict=True):
            await turn(front, [*body["messages"], choice["message"], MORE])  # type: ignore[misc]
            assert front.calls[-1].prompt_token_ids[: len(whole(call))] == whole(call)
        assert words(front)[3:] == ["exact"] * 3


async def test_after_a_restart_the_next_turn_goes_out_plainly_and_the_one_after_it_exactly() -> None:
    async with EngineStub(drift=True) as stub:
        async with Front(stub.url) as front:
            messages = await talk(front, 1)
        async with Front(stub.url) as front:
            for _ in range(2):
                messages.append(dict(MORE))
                await turn(front, messages)
            assert words(front) == ["unknown_history", "exact"]


# --- where it cannot be proven, it is not done


async def second_turn(front: Front, first: str = "say: higher", **body: Any) -> str | None:
    """The word for the second turn of a conversation."""
    history: list[dict[str, Any]] = [{"role": "user", "content": first}]
    await turn(front, history, **body)
    await turn(front, [*history, MORE])
    return words(front)[-1]


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


@pytest.mark.parametrize(
    ("renderer", "word"), [(strict, "not_rendered"), (flowing, "stop_token"), (forgetful, "no_joint")]
)
async def test_a_template_without_a_joint_that_holds(renderer: Any, word: str) -> None:
    async with EngineStub(drift=True, renderer=renderer) as stub, Front(stub.url) as front:
        assert await second_turn(front) == word
        assert front.calls[-1].altered == ("return_token_ids", "logprobs")


def naming(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """A template that says who speaks."""
    roles = [{**message, "role": f"{message['role']} {message.get('name', '')}"} for message in messages]
    return render(roles, tools)


@pytest.mark.parametrize(("renderer", "word"), [(render, "exact"), (naming, "unknown_history")])
async def test_answers_that_the_client_signs_with_a_name(renderer: Any, word: str) -> None:
    async with EngineStub(drift=True, renderer=renderer) as stub, Front(stub.url) as front:
        history: list[dict[str, Any]] = [{"role": "user", "content": "say: higher"}]
        for _ in range(2):
            answer = await turn(front, history)
            history[-1] = {**answer, "name": "Calculator"}
            history.append(dict(MORE))
        await turn(front, history)
        assert words(front) == ["first_turn", word, word]


async def test_a_stop_string() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        assert await second_turn(front, "say: higher lower", stop=["low"]) == "stop_string"


async def test_a_prompt_without_room_for_an_answer() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        history: list[dict[str, Any]] = [{"role": "user", "content": "say: higher"}]
        await turn(front, history)
        await turn(front, [*history, MORE], max_tokens=MAX_MODEL_LEN - 10)
        assert words(front)[-1] == "too_long"


async def test_images_and_echo_are_beyond_it(front: Front) -> None:
    await turn(front, [{"role": "user", "content": "hello"}], echo=True)
    assert words(front) == ["unsupported"]
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    await turn(front, [picture])
    assert front.lost == ["multimodal"]


async def test_an_engine_that_does_not_read_given_ids_is_found_out_before_it_gets_any() -> None:
    for given in ("ignored", "refused"):
        async with EngineStub(drift=True, given_ids=given) as stub, Front(stub.url) as front:  # type: ignore[arg-type]
            messages = await talk(front, 4)
            assert words(front) == ["first_turn", *["engine"] * 3]
            probes = [r for r in stub.requests if r.path == CHAT and "kv_transfer_params" in r.body]
            assert [probe.body["max_tokens"] for probe in probes] == [1], "it is asked once, not each turn"
            assert len(messages) == 8


async def test_an_engine_that_stops_reading_ids_gets_no_more() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = await talk(front, 2)
        stub.given_ids = "ignored"
        for word in ("ignored", "engine"):
            messages.append(dict(MORE))
            await turn(front, messages)
            assert words(front)[-1] == word
        assert 'ajet_continuity_total{outcome="ignored"} 1' in front.metrics.render()
        assert len(front.calls) == 4 and not front.lost


async def test_an_engine_that_refuses_the_ids_is_asked_plainly() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = await talk(front, 2)
        stub.given_ids = "refused"
        messages.append(dict(MORE))
        await turn(front, messages)
        assert words(front)[-1] == "refused"
        assert front.calls[-1].altered == ("return_token_ids", "logprobs")


async def test_a_tokenize_that_does_not_render_what_the_chat_route_read_is_not_believed() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        history: list[dict[str, Any]] = [{"role": "user", "content": "say: higher"}]
        await turn(front, history)
        stub.renderer = lambda messages, tools: "today " + render(messages, tools)
        history.append(dict(MORE))
        await turn(front, history)
        assert words(front)[-1] == "not_proven"
        history.append(dict(MORE))
        await turn(front, history)
        assert words(front)[-1] == "exact", "the turn before is rendered as it was now"


async def test_an_engine_without_tokenize_answers_all_the_same() -> None:
    async with EngineStub(drift=True, tokenizes=False) as stub, Front(stub.url) as front:
        assert await second_turn(front) == "not_rendered"


async def test_an_engine_that_fails_when_it_is_tried_is_tried_again() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = await talk(front, 1)
        for fault, word in ((Fault("status"), "not_rendered"), (Fault("not_vllm"), "not_rendered"), (None, "exact")):
            stub.faults = [fault] if fault else []
            messages.append(dict(MORE))
            await turn(front, messages)
            assert words(front)[-1] == word


async def test_a_call_whose_episode_has_ended_is_not_continued() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url) as front:
        messages = await talk(front, 1)
        call = front.calls[-1]
        front.store.state.episodes["ep"].calls[call.call].text = None
        messages.append(dict(MORE))
        await turn(front, messages)
        assert words(front)[-1] == "unknown_history"


class Thinker(EngineStub):
    """An engine that tells reasoning from content, and whose template leaves reasoning out of history. If it `looks`,
    its parser takes reasoning in the prompt's ids for the end of the reasoning to come."""

    looks = True

    async def _write(
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
        return await super()._write(request, parts, fault, delay, content_type, length)


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
        messages: list[dict[str, Any]] = [{"role": "user", "content": "say: <think>hm</think>hello"}]
        assert (await turn(front, messages, **plain))["reasoning"] == "hm"
        await turn(front, [*messages, MORE], **body)
        assert words(front) == ["first_turn", word]
        assert ("kv_transfer_params" in stub.llm_requests()[-1].body) is (word == "exact")


class Nested(EngineStub):
    """An engine whose messages hold something deep."""

    async def _write(self, request: web.Request, parts: Any, *how: Any) -> web.StreamResponse:
        deep = b'{"more":' + b'{"a":' * 1200 + b"1" + b"}" * 1200 + b","
        whole = b"".join(parts).replace(b'"message":{', b'"message":' + deep)
        return await super()._write(request, [whole], *how[:-1], len(whole))


async def test_an_answer_that_is_nested_too_deeply_to_be_known_again_is_captured_all_the_same() -> None:
    async with Nested() as stub, Front(stub.url) as front:
        await talk(front, 2)
        assert words(front) == ["first_turn", "unsupported"]
        assert not front.lost
