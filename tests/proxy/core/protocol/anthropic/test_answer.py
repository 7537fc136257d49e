"""The answer's way back: blocks that open, fill and close, and that a client puts together again what the engine said.

That vLLM's own translation gives the same bytes is shown in tests/e2e.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.anthropic.answer import Blocks
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.trajectory.call import Captured
from tests.fuzz.anthropic import blocks
from tests.fuzz.mutations import pieces
from tests.kit.steps import own_s
from tests.proxy.core.protocol import answers
from tests.proxy.core.protocol.answers import SSE, chat_event, chat_start, dump, event, ids_of, reasons

USAGE = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}
DONE = event("[DONE]")
THOUGHT = "e5d9fd59ed0ea5d26e7ba9e5cbd6e2a8"


def start() -> bytes:
    return event(chat_start([1, 2]) | {"usage": USAGE})


def chunk(delta: dict[str, Any], finish: str | None = None, stop: Any = None, token: int = 5) -> bytes:
    made = chat_event(delta, ids=[token], logprobs=[-0.5], finish=finish, usage=USAGE | {"completion_tokens": 1})
    if finish is not None:
        made["choices"][0]["stop_reason"] = stop
    return event(made)


def usage(**details: Any) -> bytes:
    told = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}
    if details:
        told["prompt_tokens_details"] = details  # type: ignore[assignment]
    return event({"id": "chatcmpl-1", "model": "policy", "choices": [], "usage": told})


def call(index: int, *, id: str | None = None, name: str | None = None, arguments: str | None = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    made = {"index": index, "function": function} | ({"id": id, "type": "function"} if id else {})
    return {"content": None, "tool_calls": [made]}


def exchange(*, stream: bool = True, status: int = 200) -> Exchange:
    running = answers.exchange("/v1/messages", {"max_tokens": 9, "messages": []})
    running.on_headers(status, SSE if stream else "application/json")
    return running


def run(*parts: bytes, running: Exchange | None = None) -> tuple[bytes, Exchange]:
    running = running or exchange()
    out = b"".join(b"".join([*running.feed(part), *running.release()]) for part in parts)
    return out + b"".join(running.finish()), running


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events, each of which says its type twice."""
    found = []
    for item in stream.decode().split("\n\n")[:-1]:
        kind, data = item.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def told(*chunks: bytes) -> list[str]:
    """A stream of `chunks` between its first event and its end, in short."""
    stream, _ = run(start() + b"".join(chunks) + usage() + DONE)
    first, *rest = events(stream)
    assert first["type"] == "message_start" and rest[-1] == {"type": "message_stop"}
    short = []
    for item in rest[:-2]:
        match item:
            case {"content_block": block}:
                short.append(f"{item['index']} {dump({k: v for k, v in block.items() if v not in ('', {})})}")
            case {"delta": delta}:
                short.append(f"{item['index']} {list(delta.values())[1]}")
            case _:
                short.append(f"{item['index']} /")
    return short


def test_the_bytes_of_a_stream() -> None:
    stream, running = run(start() + chunk({"content": 'é"😀'}) + chunk({}, "stop") + usage() + DONE)
    assert stream.decode() == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-1","type":"message",'
        '"role":"assistant","content":[],"model":"policy","stop_reason":null,"stop_sequence":null,'
        '"usage":{"input_tokens":9,"output_tokens":0}}}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"text","text":""},'
        '"index":0}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta",'
        '"text":"é\\"😀"},"index":0}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        '"usage":{"input_tokens":9,"output_tokens":3}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    [captured] = running.outcomes
    assert isinstance(captured, Captured)
    assert (captured.prompt_token_ids, captured.token_ids, captured.logprobs) == ((1, 2), (5, 5), (-0.5, -0.5))
    assert running.answers == ({"role": "assistant", "content": 'é"😀'},)


def test_one_block_is_open_at_a_time() -> None:
    blocks = told(
        chunk({"reasoning": "h"}), chunk({"reasoning": "m", "content": ""}), chunk({}), chunk({"content": "a"}),
        chunk(call(0, id="c1", name="f")), chunk(call(0, arguments='{"n":')), chunk({"content": "late"}),
        chunk(call(0, arguments="1}")), chunk(call(1, id="c2", name="g", arguments="{}")),
        chunk({"reasoning": "more"}), chunk({}, "tool_calls"),
    )  # fmt: skip
    signature = blocks[3].removeprefix("0 ")
    assert len(signature) == 32 and int(signature, 16)
    assert blocks == [
        '0 {"type":"thinking"}', "0 h", "0 m", f"0 {signature}", "0 /", '1 {"type":"text"}', "1 a", "1 /",
        '2 {"type":"tool_use","id":"c1","name":"f"}', '2 {"n":', "2 1}", "2 /",
        '3 {"type":"text"}', "3 late", "3 /", '4 {"type":"tool_use","id":"c2","name":"g"}', "4 {}", "4 /",
        '5 {"type":"thinking"}', "5 more", blocks[-2], "5 /",
    ]  # fmt: skip
    assert blocks[-2] != f"5 {signature}", "each block has a signature of its own"


C1, C2, C3 = ('%d {"type":"tool_use","id":"c' + str(i) + '","name":"f"}' for i in (1, 2, 3))


def first(index: int, arguments: str | None = None) -> bytes:
    return chunk(call(index, id=f"c{index + 1}", name="f", arguments=arguments))


def more(index: int, arguments: str) -> bytes:
    return chunk(call(index, arguments=arguments))


def test_a_call_that_goes_on_after_the_next_has_begun_loses_nothing() -> None:
    assert told(first(0, '{"a":'), first(1), more(0, "1"), more(1, '{"b"'), more(0, "} "), more(1, ":2}")) == [
        C1 % 0, '0 {"a":', "0 1", "0 } ", "0 /", C2 % 1, '1 {"b"', "1 :2}", "1 /"
    ]  # fmt: skip
    assert told(first(0), first(1, "{}"), first(2, '{"c":'), more(2, "3}"), more(0, "{}"), more(2, " ")) == [
        C1 % 0, "0 {}", "0 /", C2 % 1, "1 {}", "1 /", C3 % 2, '2 {"c":3}', "2  ", "2 /"
    ]  # fmt: skip


def test_a_call_that_never_ends_is_told_before_the_next() -> None:
    rest = first(1, "{}"), chunk({"content": "a"}), more(0, "x}"), chunk({"reasoning": "h"})
    assert told(first(0, "{"), *rest)[:-2] == [
        C1 % 0, "0 {", "0 x}", "0 /", C2 % 1, "1 {}", "1 /", '2 {"type":"text"}', "2 a", "2 /", '3 {"type":"thinking"}',
        "3 h",
    ]  # fmt: skip


def test_thinking_waits_for_a_call_that_goes_on() -> None:
    thinks = chunk({"reasoning": "h"}), chunk({"content": "a"}), chunk({"reasoning": "m"})
    blocks = told(first(0, "{"), *thinks, more(0, "}"), chunk({"reasoning": "m"}))
    assert [line for line in blocks if len(line) < 30] == [
        "0 {", "0 }", "0 /", '1 {"type":"thinking"}', "1 h", "1 /", '2 {"type":"text"}', "2 a", "2 /",
        '3 {"type":"thinking"}', "3 m", "3 m", "3 /",
    ]  # fmt: skip


@pytest.mark.parametrize("behind", [{"content": "a"}, call(1, id="c2", name="f", arguments="a")])
@pytest.mark.parametrize("end", ["}", "{}"])
def test_what_waits_behind_a_long_call_has_it_read_once(behind: dict[str, Any], end: str) -> None:
    arguments = json.dumps({"a": "b" * 500_000})[:-1] + end
    blocks = Blocks("m")
    blocks.add(call(0, id="c1", name="f", arguments=arguments))

    def wait() -> None:
        for _ in range(500):
            blocks.add(behind)

    assert own_s(wait, 1) < 50 * own_s(lambda: json.loads(json.dumps(arguments)), 3)


def test_a_call_may_be_told_its_name_and_id_apart() -> None:
    assert told(more(0, "{"), chunk(call(0, id="c1")), chunk(call(0, name="f", arguments="}")), first(1)) == [
        C1 % 0, "0 {}", "0 /", C2 % 1, "1 /"
    ]  # fmt: skip
    again = chunk(call(0, id="c2", name="f", arguments="{}"))
    assert told(first(0, "{"), first(0, "}"), again) == [C1 % 0, "0 {", "0 }", "0 /", C2 % 1, "1 {}", "1 /"]


@pytest.mark.parametrize(("said", "reason"), [
    ((chunk(call(0, id="c1", arguments="{}")),), "capture_failed"),
    ((first(0, "{}"), first(1, "{}"), more(0, "x")), "capture_failed"),
    ((first(0, "{}"), first(1), more(0, " ")), None),
])  # fmt: skip
def test_a_call_that_its_client_cannot_be_told_whole_is_lost(said: tuple[bytes, ...], reason: str | None) -> None:
    stream, running = run(start(), *said, chunk({}, "tool_calls"), usage() + DONE)
    assert reasons(running.outcomes) == [reason or "captured"] and events(stream)[-1]["type"] == "message_stop"
    assert running.contradicted == reason


@pytest.mark.parametrize("seed", range(60))
def test_whatever_alternates_each_block_is_told_whole_and_in_order(seed: int) -> None:
    """Each call is told in the order in which it began, all of its arguments, and in one block."""
    dice = random.Random(seed)
    calls = [dump({"n": place, "x": "é}{\""[: dice.randrange(5)]}) for place in range(dice.randrange(1, 5))]
    left, begun, deltas = list(calls), 0, []
    while begun < len(calls) or any(left):
        others = [place for place in range(begun) if left[place]]
        place = dice.choice([*others, begun] if begun < len(calls) else others)
        if place == begun:
            begun += 1
            deltas.append(first(place))
        cut = dice.randint(0, len(left[place]))
        deltas.append(more(place, left[place][:cut]))
        left[place] = left[place][cut:]
        if dice.random() < 0.5:
            deltas.append(chunk({dice.choice(["content", "reasoning"]): "w"}))
    stream, running = run(start(), *deltas, chunk({}, "tool_calls"), usage() + DONE)
    content = blocks(stream)
    assert [block["partial_json"] for block in content if block["type"] == "tool_use"] == calls
    texts = "".join(block.get("text", "") + block.get("thinking", "") for block in content)
    assert texts == "w" * sum(b'"w"' in delta for delta in deltas)
    assert reasons(running.outcomes) == ["captured"]


@pytest.mark.parametrize(("finish", "stop", "reason", "sequence"), [
    ("stop", None, "end_turn", None), ("stop", 7, "end_turn", None), ("stop", "END", "stop_sequence", "END"),
    ("length", None, "max_tokens", None), ("tool_calls", None, "tool_use", None), ("abort", None, None, None),
])  # fmt: skip
def test_why_it_ended(finish: str, stop: Any, reason: str | None, sequence: str | None) -> None:
    stream, running = run(start() + chunk({"content": "a"}, finish, stop) + usage() + DONE)
    end = events(stream)[-2]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert reasons(running.outcomes) == ["engine_aborted" if finish == "abort" else "captured"]
    body, _ = run(dump(document({"content": "a"}, finish, stop)).encode(), running=exchange(stream=False))
    whole = json.loads(body)
    assert (whole.get("stop_reason"), whole.get("stop_sequence")) == (reason, sequence)


def test_a_call_that_a_string_stopped_is_told_in_two_ways_as_vllm_does() -> None:
    stream, _ = run(start() + chunk({}, "tool_calls", "END") + usage() + DONE)
    assert events(stream)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    body, _ = run(dump(document({"content": "a"}, "tool_calls", "END")).encode(), running=exchange(stream=False))
    assert json.loads(body)["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("details", "told"), [
    ({}, {"input_tokens": 9}), ({"cached_tokens": 4}, {"input_tokens": 5, "cache_read_input_tokens": 4}),
    ({"cached_tokens": 4, "created_cache_tokens": 7},
     {"input_tokens": 0, "cache_creation_input_tokens": 7, "cache_read_input_tokens": 4}),
    ({"cached_tokens": None, "multimodal_tokens": None}, {"input_tokens": 9}),
])  # fmt: skip
def test_tokens_from_a_cache_are_counted_apart(details: dict[str, Any], told: dict[str, int]) -> None:
    stream, _ = run(start() + chunk({}, "stop") + usage(**details) + DONE)
    assert events(stream)[-2]["usage"] == told | {"output_tokens": 3}


def test_an_engine_that_counts_nothing() -> None:
    stream, _ = run(event(chat_start([1])) + chunk({"content": "a"}, "stop") + DONE)
    first, *_, last = events(stream)
    assert first["message"]["usage"] == {"input_tokens": 0, "output_tokens": 0} and last["type"] == "message_stop"


def test_the_end_waits_until_the_call_is_durable() -> None:
    running = exchange()
    early = b"".join(running.feed(start() + chunk({"content": "a"})))
    assert not running.settled
    assert running.feed(chunk({"content": "b"}, "stop")) == [] and running.settled
    assert ids_of(running.outcomes) == [(5, 5)]
    late = b"".join(running.release())
    assert [item["type"] for item in events(early)][-1] == "content_block_delta"
    assert events(late) == [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}, "index": 0}]
    assert [item["type"] for item in events(b"".join(running.feed(usage() + b"data:\n\n" + DONE)))] == [
        "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert running.finish() == [] and ids_of(running.outcomes) == [(5, 5)]


# --- bad days


def test_ids_behind_the_finish_spoil_the_call_on_the_fast_way_too() -> None:
    said = start() + chunk({"content": "a"}) + chunk({"content": "b"}, "stop")
    for parts in ([said, chunk({"content": "c"}), usage() + DONE], [said + chunk({"content": "c"}) + usage() + DONE]):
        stream, running = run(*parts)
        assert events(stream)[-1]["type"] == "message_stop" and b'"text":"c"' in stream
        assert reasons(running.outcomes) == ["capture_failed"]


@pytest.mark.parametrize(("more", "reason"), [
    (chunk({"content": "c"}), "capture_failed"), (chunk({}, "error"), "engine_error"), (DONE, "captured"),
    (b'data: {"error":{"message":"unwell"}}\n\n', "engine_error"), (b"data: no json\n\n", "captured"),
])  # fmt: skip
def test_what_comes_behind_the_last_event_is_not_shown_and_counts_all_the_same(more: bytes, reason: str) -> None:
    running = exchange()
    running.feed(start() + chunk({"content": "b"}, "stop") + usage() + DONE.replace(b"]", b"] "))
    assert events(b"".join(running.release()))[-1]["type"] == "message_stop"
    assert ids_of(running.outcomes) == [(5,)] and running.contradicted is None
    assert b"".join(running.feed(more)) == b"" and reasons(running.outcomes) == [reason]
    assert running.contradicted == (None if reason == "captured" else reason)


@pytest.mark.parametrize("error", [{"message": "unwell", "type": "InternalServerError", "code": 500}, "unwell"])
@pytest.mark.parametrize("begun", [b"", start(), start() + chunk({"content": "a"})])
def test_an_error_in_the_stream_ends_it(begun: bytes, error: Any) -> None:
    stream, running = run(begun + event({"error": error}) + DONE)
    assert events(stream)[-1] == {"type": "error", "error": {"type": "internal_error", "message": "unwell"}}
    assert len(events(stream)) == (0 if not begun else 1 if begun == start() else 3) + 1
    assert reasons(running.outcomes) == ["engine_error"]


@pytest.mark.parametrize("bad", [
    b"data: no json\n\n", b"data: []\n\n", b"data: \xff\n\n", b'data: {"choices":[{"index":0,"delta":{}}]}\n\n',
    b'data: {"choices":[{"index":3}]}\n\n', b"data: " + b'{"a":' + b"[" * 100_000 + b"\n\n",
])  # fmt: skip
def test_a_stream_that_cannot_be_read_ends_with_an_error(bad: bytes) -> None:
    whole = bad + chunk({"content": "b"}, "stop") + usage() + DONE
    for parts in ([whole], [whole[i : i + 1] for i in range(len(whole))] if len(whole) < 9999 else [whole]):
        stream, running = run(*parts)
        [last] = events(stream)
        assert last["type"] == "error" and "cannot be read" in last["error"]["message"]
        assert reasons(running.outcomes) == ["capture_failed"] and not running.keep_alive()


@pytest.mark.parametrize(("written", "text"), [
    ("\\ud83d\\ude00", "😀"), ("\\u00e9", "é"), ("\\/", "/"), ("\\u0001", "\\u0001"),
])  # fmt: skip
def test_text_is_written_in_one_way_however_it_was_split(written: str, text: str) -> None:
    said = chunk({"content": "WORD"}).replace(b"WORD", written.encode())
    for parts in ([start(), chunk({"content": "a"}), said], [start(), chunk({"content": "a"}), said[:9], said[9:]]):
        assert f'"text":"{text}"'.encode() in run(*parts)[0]


def test_text_that_is_no_utf_8_ends_a_stream_with_an_error() -> None:
    bad = chunk({"content": "WORD"}).replace(b"WORD", b"\xff")
    for parts in ([start() + chunk({"content": "a"}), bad], [start() + chunk({"content": "a"}), bad[:9], bad[9:]]):
        stream, running = run(*parts)
        assert b"event: error" in stream and b"\xff" not in stream
        assert reasons(running.outcomes) == ["capture_failed"]


@pytest.mark.parametrize(("bad", "reason"), [
    (chunk({"content": "a"}, "error"), "engine_error"),
    (event(chat_start([1, 3])) + chunk({"content": "a"}, "stop"), "capture_failed"),
    (chunk({"content": "a"}, "stop") + chunk({"content": "b"}), "capture_failed"),
])  # fmt: skip
def test_a_stream_whose_call_is_lost_is_told_to_its_end(bad: bytes, reason: str) -> None:
    stream, running = run(start(), bad, usage() + DONE)
    assert b'"text":"a"' in stream and events(stream)[-1] == {"type": "message_stop"}
    assert reasons(running.outcomes) == [reason]


def test_a_stream_that_just_stops_stops() -> None:
    stream, running = run(start() + chunk({"content": "a"}) + b'data: {"half')
    assert [item["type"] for item in events(stream)][-1] == "error"
    stream, running = run(start() + chunk({"content": "a"}))
    assert [item["type"] for item in events(stream)][-1] == "content_block_delta"
    assert reasons(running.outcomes) == ["truncated"]
    running = exchange()
    running.feed(start() + chunk({"content": "a"})[:-3])
    assert running.abort() == [] and reasons(running.outcomes) == ["truncated"]


def test_comments_of_the_engine_are_nothing() -> None:
    stream, _ = run(b": ping\n\n" + start() + b"\n" + DONE)
    assert [item["type"] for item in events(stream)] == ["message_start", "message_stop"]
    assert run(DONE)[0] == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


# --- documents


def document(message: dict[str, Any], finish: str | None = "stop", stop: Any = None, **top: Any) -> dict[str, Any]:
    rows = [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}]
    choice = {"index": 0, "message": {"role": "assistant", **message}, "logprobs": {"content": rows}}
    choice |= {"finish_reason": finish, "stop_reason": stop, "token_ids": [5]}
    head = {"id": "chatcmpl-1", "model": "policy", "choices": [choice], "usage": USAGE, "prompt_token_ids": [1, 2]}
    return head | top


def whole(body: Any) -> tuple[bytes, Exchange]:
    return run(body if isinstance(body, bytes) else dump(body).encode(), running=exchange(stream=False))


def tool(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_the_bytes_of_a_document() -> None:
    calls = [tool('{"é": [1.50, null]}'), tool("null")]
    said = {"reasoning": "hm", "content": "é", "tool_calls": calls}
    body, running = whole(document(said, "tool_calls", kv_transfer_params={"a": None}, ec_transfer_params=None))
    shown = json.loads(body)
    signature = shown["content"][0]["signature"]
    assert body.decode() == (
        '{"id":"chatcmpl-1","type":"message","role":"assistant","content":['
        f'{{"type":"thinking","thinking":"hm","signature":"{signature}"}},{{"type":"text","text":"é"}},'
        '{"type":"tool_use","id":"c1","name":"f","input":{"é":[1.5,null]}},{"type":"tool_use","id":"c1","name":"f"}],'
        '"model":"policy","stop_reason":"tool_use","usage":{"input_tokens":9,"output_tokens":0},'
        '"kv_transfer_params":{"a":null}}'
    )
    assert ids_of(running.outcomes) == [(5,)]


@pytest.mark.parametrize("content", [None, ""])
def test_nothing_said_is_one_empty_text(content: str | None) -> None:
    body, _ = whole(document({"content": content, "reasoning": None, "tool_calls": []}))
    assert json.loads(body)["content"] == [{"type": "text", "text": ""}]


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    body, _ = whole(dump(document({"content": "x"})).replace('"x"', '"\\ud83d"').encode())
    assert b'"text":"\\ud83d"' in body


@pytest.mark.parametrize("arguments", ['{"a": 1', "{a: 1}", "3", '["a"]', "[" * 100_000])
def test_arguments_that_are_no_object_reach_the_agent_as_they_are(arguments: str) -> None:
    """In a document under a name that says so, in a stream in its pieces. The agent can tell its model of them."""
    body, running = whole(document({"tool_calls": [tool(arguments)]}, "length"))
    [block] = json.loads(body)["content"]
    assert block == {"type": "tool_use", "id": "c1", "name": "f", "input": {"INVALID_JSON": arguments}}
    assert ids_of(running.outcomes) == [(5,)], "what was sampled was sampled"
    stream, streamed = run(start(), first(0, arguments), chunk({}, "length"), usage() + DONE)
    [block] = blocks(stream)
    assert block["partial_json"] == arguments and reasons(streamed.outcomes) == ["captured"]
    assert events(stream)[-2]["delta"]["stop_reason"] == json.loads(body)["stop_reason"] == "max_tokens"


def test_no_arguments_are_an_empty_object() -> None:
    body, _ = whole(document({"tool_calls": [tool("")]}, "tool_calls"))
    assert json.loads(body)["content"][0]["input"] == {}


def test_a_refusal_is_told_in_anthropics_shape() -> None:
    running = exchange(stream=False, status=404)
    error = {"error": {"message": "é?", "type": "NotFoundError", "param": "model", "code": 404}}
    assert running.feed(dump(error).encode()) == []
    assert running.finish() == ['{"type":"error","error":{"type":"NotFoundError","message":"é?"}}'.encode()]
    assert reasons(running.outcomes) == ["refused"]


@pytest.mark.parametrize("body", [
    b"", b"<html>", b'{"error":"Unauthorized"}', b'{"error":{}}', b'{"choices":[]}', b'{"choices":[{"index":0}]}',
    dump(document({"tool_calls": [{}]})).encode(),
])  # fmt: skip
def test_a_document_that_cannot_be_read_passes_as_it_is(body: bytes) -> None:
    shown, running = whole(body)
    assert shown == body
    assert reasons(running.outcomes) == ["engine_error" if b"Unauthorized" in body else "capture_failed"]


@pytest.mark.parametrize(("times", "finish", "reason"), [(1, "error", "engine_error"), (2, "stop", "capture_failed")])
def test_a_document_whose_call_is_lost_is_told_all_the_same(times: int, finish: str, reason: str) -> None:
    """An engine that failed, and one that tells one choice twice."""
    said = document({"content": "a"}, finish)
    body, running = whole(said | {"choices": said["choices"] * times})
    assert json.loads(body)["content"] == [{"type": "text", "text": "a"}]
    assert reasons(running.outcomes) == [reason]


# --- laws

WORDS = st.text(st.characters(codec="utf-8"), max_size=6)
DELTAS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"content": WORDS}), st.fixed_dictionaries({"reasoning": WORDS}), st.just({}),
        st.tuples(st.integers(0, 2), WORDS).map(lambda pair: call(pair[0], arguments=pair[1])),
    ),
    max_size=12,
)  # fmt: skip


def chat_stream(deltas: list[dict[str, Any]]) -> bytes:
    """A chat stream in which each call begins before its first piece and no other call's pieces come after."""
    out, begun, base = [start()], -1, 0
    for place, delta in enumerate(deltas):
        for piece in delta.get("tool_calls", ()):
            if piece["index"] + base <= begun:
                base = begun + 1 - piece["index"]
            piece["index"] += base
            begun = piece["index"]
            piece |= {"id": f"c{begun}"}
            piece["function"] |= {"name": f"f{begun}"}
        out.append(chunk(delta, token=place))
    return b"".join([*out, chunk({}, "stop", token=99), usage(), DONE])


@given(DELTAS, st.integers(0, 10**9))
def test_no_split_matters_and_the_pieces_make_the_document(deltas: list[dict[str, Any]], seed: int) -> None:
    stream = chat_stream(deltas)
    one, running = run(stream)
    by_event = [item + b"\n\n" for item in stream.split(b"\n\n")[:-1]]
    for parts in (pieces(stream, random.Random(seed)), by_event, [stream[i : i + 1] for i in range(len(stream))]):
        out, again = run(*parts)
        assert (out, again.outcomes) == (one, running.outcomes)
    assert ids_of(running.outcomes) == [(*range(len(deltas)), 99)]
    content = blocks(one)
    for kind, name in (("text", "content"), ("thinking", "reasoning")):
        texts = "".join(block[kind] for block in content if block["type"] == kind)
        assert texts == "".join(delta.get(name) or "" for delta in deltas)
    sent = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert [block["partial_json"] for block in content if block["type"] == "tool_use"] == sent
