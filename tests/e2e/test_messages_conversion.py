"""The proxy's translation of Anthropic's Messages API beside vLLM's own: requests, streams and documents, no server.

vLLM answers ``/v1/messages`` by translating to its chat route and back. Here both translate what hypothesis makes up,
and must agree on every field and byte, except for the signatures of thinking, which are random in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_proxy.core.protocol.anthropic.messages import MESSAGES
from ajet_proxy.core.protocol.anthropic.request import to_chat
from ajet_proxy.core.protocol.anthropic.template import Template
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.trajectory.call import Captured
from ajet_sdk.errors import BadRequest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch's, on import

SIGNATURE = re.compile(r'"signature":"[0-9a-f]{32}"')
TEXT = st.sampled_from(
    ["", "a", " b", "é日😀", "x-anthropic-billing-header: v=1", '"q\\"', "\n", "\x7f", "\u2028", "<think>"]
)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with any of `fields`."""
    return st.fixed_dictionaries({}, optional=fields)


def block(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return some(**fields, cache_control=st.just({"type": "ephemeral"})).map(lambda made: {"type": kind} | made)


VALUE = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=4,
)  # fmt: skip
SOURCE = st.sampled_from([{"type": "url", "url": "http://x/y"}, {"type": "base64", "data": "A"}, {"data": "B"},
                          {"type": "base64", "media_type": "image/png", "data": "C"}])  # fmt: skip
IMAGE = SOURCE.map(lambda source: {"type": "image", "source": source})
SAID = block("text", text=TEXT | st.none())
RESULT = block(
    "tool_result", tool_use_id=st.just("c1"), is_error=st.booleans(),
    content=st.none() | TEXT | st.lists(
        some(text=TEXT).map(lambda made: {"type": "text"} | made) | IMAGE
        | some(tool_name=TEXT, name=TEXT).map(lambda made: {"type": "tool_reference"} | made), max_size=3,
    ),
)  # fmt: skip
CALL = block("tool_use", name=TEXT, input=st.none() | st.dictionaries(TEXT, VALUE, max_size=3)).map(
    lambda made: made | {"id": "c1"}  # without one, vLLM names the call by the clock
)
THOUGHT = block("thinking", thinking=TEXT, signature=TEXT) | block("redacted_thinking", data=TEXT)
BLOCKS = {"user": SAID | IMAGE | RESULT, "assistant": SAID | THOUGHT | CALL | RESULT, "system": SAID}
MESSAGE = st.sampled_from(list(BLOCKS)).flatmap(
    lambda role: st.fixed_dictionaries({"role": st.just(role), "content": TEXT | st.lists(BLOCKS[role], max_size=4)})
)
SCHEMA = st.sampled_from([{}, {"type": "object"}, {"properties": {"a": {"type": "integer"}}}])
TOOLS = st.lists(some(description=st.none() | TEXT, strict=st.none() | st.booleans(), defer_loading=st.booleans()),
                 min_size=1, max_size=3)  # fmt: skip
CHOICE = st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "n0"}])
ASKED = some(
    system=st.none() | TEXT | st.lists(SAID, max_size=3), stream=st.none() | st.booleans(),
    temperature=st.none() | st.just(0.7), top_p=st.just(0.9), top_k=st.none() | st.just(5),
    stop_sequences=st.none() | st.lists(TEXT, max_size=2), metadata=st.just({"user_id": "u"}),
    thinking=st.sampled_from([None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"},
                              {"type": "enabled", "budget_tokens": 1024}]),
    output_config=st.none() | some(
        effort=st.sampled_from([None, "low", "max"]),
        format=st.none() | st.just({"type": "json_schema", "schema": {"type": "string"}}),
    ),
    cache_salt=st.just("s"), kv_transfer_params=st.just({"a": 1}), ec_transfer_params=st.just({"b": 1}),
    vllm_xargs=st.just({"c": 1}), chat_template_kwargs=st.just({"d": False}),
)  # fmt: skip


@settings(max_examples=250)
@given(
    ASKED, st.lists(MESSAGE, max_size=4), st.sampled_from([1, 2000]), st.none() | st.tuples(TOOLS, SCHEMA),
    st.none() | st.tuples(CHOICE, st.none() | st.booleans()), st.booleans(), st.sampled_from(["none", "low"]),
)  # fmt: skip
def test_a_request_means_the_same_to_the_engine(
    asked: dict[str, Any], messages: list[Any], limit: int, tools: Any, choice: Any, merges: bool, effort: Any
) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = {"model": "m", "max_tokens": limit, "messages": messages, **asked}
    if tools is not None:
        made, schema = tools
        asked["tools"] = [{"name": f"n{place}", "input_schema": schema} | tool for place, tool in enumerate(made)]
        if choice is not None:
            asked["tool_choice"] = choice[0] | {"disable_parallel_tool_use": choice[1]}
    try:
        parsed = AnthropicMessagesRequest.model_validate(json.loads(json.dumps(asked)))
        theirs = AnthropicServingMessages.to_chat_completion_request(
            parsed, merge_inline_system=merges, disabled_thinking_effort=effort
        )
    except ValueError:
        with pytest.raises((BadRequest, ValueError)):
            ChatCompletionRequest.model_validate(to_chat(asked, Template(merges, effort)))
        return
    ours = ChatCompletionRequest.model_validate(json.loads(json.dumps(to_chat(asked, Template(merges, effort)))))
    assert fields(ours) == fields(theirs)


def fields(request: Any) -> dict[str, Any]:
    """The fields that the engine makes of a request; no stop strings are the same as none."""
    told: dict[str, Any] = request.model_dump(exclude={"request_id"})
    return told | {"stop": told["stop"] or None}


# --- answers


def converter() -> Any:
    """vLLM's own, without an engine behind it."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    made = AnthropicServingMessages.__new__(AnthropicServingMessages)
    made.stop_reason_map = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return made


def usage(sampled: int) -> st.SearchStrategy[dict[str, Any]]:
    counts = {"prompt_tokens": 10, "total_tokens": 10 + sampled, "completion_tokens": sampled}
    return st.fixed_dictionaries({name: st.just(value) for name, value in counts.items()}, optional={
        "prompt_tokens_details": some(
            cached_tokens=st.sampled_from([None, 0, 4]), created_cache_tokens=st.sampled_from([None, 3, 20])
        ),
        "completion_tokens_details": st.just({"reasoning_tokens": 1}),
    })  # fmt: skip


ARGUMENTS = st.sampled_from([("{}",), ('{"a":1}',), ('{"a":', "1}"), ("", '{"é":[', "", "]}")])
CALLS = st.lists(ARGUMENTS, min_size=1, max_size=2)
"""The arguments of some calls, in pieces."""
DELTA = (
    st.fixed_dictionaries({"content": TEXT}) | st.fixed_dictionaries({"reasoning": TEXT}) | st.just({})
    | st.fixed_dictionaries({"content": st.none() | TEXT, "tool_calls": CALLS})
)  # fmt: skip


def numbered(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`deltas` with their calls in order, one after the other: of calls whose pieces alternate vLLM loses some."""
    out, count = [], 0
    for delta in deltas:
        pieces: list[dict[str, Any]] = []
        for arguments in delta.get("tool_calls", ()):
            head = {"id": f"id{count}", "type": "function", "function": {"name": "f", "arguments": arguments[0]}}
            rest = [{"index": count, "function": {"arguments": more}} for more in arguments[1:]]
            pieces += [{"index": count} | head, *rest]
            count += 1
        out.append({**delta, "tool_calls": pieces} if pieces else delta)
    return out
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}
ROWS = {"content": [{"token": "t", "logprob": -0.5, "bytes": [1], "top_logprobs": []}]}
END = st.tuples(st.sampled_from(["stop", "length", "tool_calls", "abort"]), st.sampled_from([None, 7, "STOP"]))


def chunk(delta: Any, told: Any, end: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": ROWS, "finish_reason": None, "token_ids": [3]}
    if end is not None:
        choice |= {"finish_reason": end[0], "stop_reason": end[1]}
    return HEAD | {"object": "chat.completion.chunk", "choices": [choice], "usage": told}


@st.composite
def streams(draw: Any) -> list[str]:
    """The events of a chat stream, as vLLM writes them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

    *deltas, last = numbered(draw(st.lists(DELTA, min_size=1, max_size=10)))
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunks = [HEAD | {"object": "chat.completion.chunk", "choices": [first], "usage": draw(usage(0)),
                      "prompt_token_ids": [1, 2]}]  # fmt: skip
    chunks += [chunk(delta, draw(usage(place))) for place, delta in enumerate(deltas)]
    chunks.append(chunk(last, draw(usage(len(deltas))), draw(END)))
    if draw(st.integers(0, 9)):
        chunks.append(HEAD | {"object": "chat.completion.chunk", "choices": [], "usage": draw(usage(9))})
    told = [ChatCompletionStreamResponse.model_validate(made).model_dump_json(exclude_unset=True) for made in chunks]
    return [f"data: {line}\n\n" for line in (*told, "[DONE]")]


def unsigned(text: str) -> str:
    return SIGNATURE.sub('"signature":""', text)


@settings(max_examples=150)
@given(streams(), st.integers(1, 400))
def test_a_stream_is_told_in_the_same_bytes(lines: list[str], size: int) -> None:
    async def theirs() -> str:
        async def engine() -> AsyncIterator[str]:
            for line in lines:
                yield line

        return "".join([event async for event in converter().message_stream_converter(engine())])

    whole = "".join(lines).encode()
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    expected = unsigned(asyncio.run(theirs()))
    for parts in (pieces, [line.encode() for line in lines]):
        asked = JsonBody(b'{"model":"m","max_tokens":9,"messages":[],"stream":true}')
        running = Exchange(MESSAGES, MESSAGES.translate(asked))
        running.on_headers(200, "text/event-stream")
        out = b"".join(b"".join([*running.feed(part), *running.release()]) for part in parts)
        assert unsigned((out + b"".join(running.finish())).decode()) == expected
        assert isinstance(running.outcomes[0], Captured) == ('"finish_reason":"abort"' not in whole.decode())


TOOL_CALL = st.sampled_from(["{}", '{"a":null,"é":[1.50]}', "null", '{"b":{"c":null}}', '{"cut":', "3"]).map(
    lambda arguments: {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
)
MESSAGE_OUT = some(content=st.none() | TEXT, reasoning=st.none() | TEXT, tool_calls=st.lists(TOOL_CALL, max_size=2))


@settings(max_examples=150)
@given(MESSAGE_OUT, END, usage(4), st.none() | st.just({"a": None}))
def test_a_document_is_told_in_the_same_bytes(said: dict[str, Any], end: Any, told: Any, params: Any) -> None:
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    choice = {"index": 0, "message": {"role": "assistant"} | said, "finish_reason": end[0], "stop_reason": end[1],
              "token_ids": [1], "logprobs": ROWS}  # fmt: skip
    engine = ChatCompletionResponse.model_validate(
        HEAD | {"choices": [choice], "usage": told, "prompt_token_ids": [3], "kv_transfer_params": params}
    )
    try:
        message = converter().messages_full_converter(engine)
        theirs = JSONResponse(content=message.model_dump(exclude_none=True)).body
    except ValueError:
        theirs = None  # vLLM's client learns nothing of arguments that are no object, and of their message
    running = Exchange(MESSAGES, MESSAGES.translate(JsonBody(b'{"model":"m","max_tokens":9,"messages":[]}')))
    running.on_headers(200, "application/json")
    running.feed(engine.model_dump_json().encode())
    ours = b"".join(running.finish()).decode()
    if theirs is None:
        assert '"input":{"INVALID_JSON":' in ours
        return
    assert unsigned(ours) == unsigned(bytes(theirs).decode())
