"""The stub engine against the tapes of the real one: the same requests must get answers of the same shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit import tapes, wire
from tests.kit.engine_stub import CHAT, EngineStub
from tests.kit.engine_tokens import decode, encode, render, tool_text

STUB = {"models": ("tiny",)}
# vLLM words these refusals by its own validators, which no stub needs to imitate.
WORDED = ("chat-error-type", "chat-error-400", "completions-error-400")
# What the stub does not imitate, because the tapes themselves are replayed wherever it is tested: reasoning parsers
# (`quiet` hides what they find), beam search, the logprobs of prompts and of chosen ids, numbers written as text,
# a chat's echo and one that generates nothing, and tools that are required or named, which the tiny model calls with
# arguments that are no object.
UNLIKE = (
    "reasoning", "quiet", "beam", "prompt-logprobs", "chat-logprob-ids", "n-lax", "chat-echo", "echo-score", "required",
    "named",
)  # fmt: skip
SHAPED = [
    key for key in sorted(tapes.load()) if not key[0].startswith(WORDED) and not any(word in key[0] for word in UNLIKE)
]


def shape(value: Any) -> Any:
    """`value` with its scalars replaced by their types; a list is the shapes it holds, each once."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(shape(item)) for item in value})
    return type(value).__name__


def shapes(answer: wire.Answer | tapes.Tape, *, stream: bool) -> set[str]:
    """Every shape of event (or the one of the body), key order included."""
    text = answer.body.decode()
    if not stream or not text.startswith("data: "):
        return {json.dumps(_normal(json.loads(text)))}
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return {event if event == "[DONE]" else json.dumps(_normal(json.loads(event))) for event in events}


def _normal(event: dict[str, Any]) -> Any:
    """The shape of `event` without what depends on what was sampled: which token showed text, how it is spelt."""
    for choice in event.get("choices", ()):
        if choice.get("delta") == {}:
            choice["delta"] = {"content": ""}
        if choice.get("message", {}).get("content", "") is None:
            choice["message"]["content"] = ""
        if "stop_reason" in choice:
            choice["stop_reason"] = None
        if rows := choice.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [row and {"id": next(iter(row.values()))} for row in rows]
        logprobs = choice.get("logprobs") or {}
        if "top_logprobs" in logprobs:
            logprobs["top_logprobs"] = [{"token": 0.5}]
        for row in logprobs.get("content") or ():
            row["bytes"] = [1]
            for other in row["top_logprobs"]:
                other["bytes"] = [1]
    return shape(event)


@pytest.mark.parametrize(("name", "asked_by"), SHAPED)
async def test_answers_are_shaped_as_the_real_engine_shapes_them(stub: EngineStub, name: str, asked_by: str) -> None:
    tape = tapes.load()[name, asked_by]
    request = dict(tape.request)
    if "messages" in request and "stop" in name:
        request["messages"] = [{"role": "user", "content": "say: hello there, hello"}]
    if "utf8" in name and "messages" in request:
        request["messages"] = [{"role": "user", "content": "say: é日😀日é"}]
    if name.startswith("chat-tools2"):
        request["messages"] = [{"role": "user", "content": "say: " + tool_text("guess", '{"number": 3}') * 2}]
    answer = await wire.send(stub.url + tape.route, body=request)
    assert answer.status == tape.status
    assert answer.headers["content-type"] == tape.headers["content-type"]
    plain = tapes.load()[f"{name.split('-')[0]}-plain-stream", asked_by]
    ours, theirs = shapes(answer, stream=tape.stream), shapes(tape, stream=tape.stream) | shapes(plain, stream=True)
    assert ours <= theirs, "\n".join([*sorted(ours - theirs), "recorded:", *sorted(theirs)])


@pytest.mark.parametrize("ids", [False, True])
async def test_offsets_of_an_echo_count_the_text_so_far(stub: EngineStub, ids: bool) -> None:
    """As in the tapes: who asks for ids gets no prompt in the text, and yet its logprobs in the first event."""
    body = {"prompt": "sayé", "echo": True, "logprobs": 1, "max_tokens": 6, "stream": True, "return_token_ids": ids}
    answer = await wire.send(stub.url + "/v1/completions", body=body)
    text = ""
    for raw in answer.body.decode().split("\n\n")[:-2]:
        [choice] = json.loads(raw.removeprefix("data: "))["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["text_offset"][0] == len(text)
        assert (logprobs["token_logprobs"][:1] == [None]) == (text == "")
        text += choice["text"]
    assert text.startswith("sayé") != ids


@pytest.mark.parametrize("asked_by", [tapes.AGENT, tapes.PROXY])
async def test_random_splits_change_no_byte(asked_by: str) -> None:
    request = tapes.load()["chat-n2-stream", asked_by].request
    async with EngineStub(models=("tiny",)) as whole, EngineStub(models=("tiny",), split_seed=3) as split:
        one = await wire.send(whole.url + CHAT, body=request)
        other = await wire.send(split.url + CHAT, body=request)
    assert one.body == other.body
    assert len(other.chunks) > 2 * len(one.chunks)


async def test_a_reply_rendered_back_is_what_was_sampled(stub: EngineStub) -> None:
    tools = [{"type": "function", "function": {"name": "guess", "parameters": {}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "pläy"}]
    seen: list[int] = []
    for turn in range(4):
        body = {"messages": messages, "tools": tools, "return_token_ids": True}
        answer = (await wire.send(stub.url + CHAT, body=body)).json()
        choice = answer["choices"][0]
        assert answer["prompt_token_ids"][: len(seen)] == seen
        seen = answer["prompt_token_ids"] + choice["token_ids"]
        message = choice["message"]
        messages.append({key: message[key] for key in ("role", "content", "tool_calls") if key in message})
        if message.get("tool_calls"):
            answered = message["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": answered, "content": f"higher {turn}"})
        else:
            messages.append({"role": "user", "content": "again"})
    assert decode(encode(render(messages, None)), skip_chat_marks=False) == render(messages, None)
