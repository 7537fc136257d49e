"""Events for a waiting client are of its own dialect, and what it has in the end is the same with and without it.

Every stream on tape is played with a keep-alive at each place where the client may wait, and read by the strictest
readers: one that knows four fields of an event and nothing else, the types and accumulators of the `openai` package,
and an accumulator that begins anew with each ``response.in_progress``, as that of openai-node does.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ajet_proxy.core.protocol.dialect import COMMENT, Ask
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.responses.answer import ResponseReading
from tests.kit.record_tapes import PASSED
from tests.proxy.core.protocol.answers import chat_event, chat_start, event
from tests.proxy.core.replaying import RECORDED, exchange_of
from tests.proxy.core.streams import DONE, END, START, WORD, streaming

MESSAGES = "/v1/messages"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


STREAMS = {
    name: (asked, told) for name, (asked, told) in RECORDED.items()
    if told.stream and told.status == 200 and name not in (*PASSED, "responses-background-stream")
}  # fmt: skip


def messages() -> Exchange:
    return streaming({"max_tokens": 50, "messages": [{"role": "user", "content": "?"}]}, MESSAGES)


def played(running: Exchange, chunks: list[bytes], *, waits: bool) -> bytes:
    """All that the client gets. If it `waits`, then as long as it lets itself be told so: after each chunk, and before
    the end that is held back."""
    out = [running.keep_alive(), running.keep_alive()] if waits else []
    for chunk in chunks:
        out += running.feed(chunk)
        out += [running.keep_alive()] if waits else []
        if running.settled:
            out += [running.keep_alive()] if waits else []
            out += running.release()
            out += [running.keep_alive()] if waits else []
    return b"".join([*out, *running.finish()])


def strictly(stream: bytes) -> list[dict[str, str]]:
    """The events of a stream for a reader that knows four fields, and comments before the first event alone. It
    dispatches at each empty line."""
    out: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    for line in stream.decode().split("\n")[:-1]:
        if line:
            name, _, value = line.partition(": ")
            assert name in ("data", "event", "id", "retry") or (line.encode() + b"\n" == COMMENT and not out), line
            fields |= {name: value} if name else {}
        else:
            assert "data" in fields, "an empty event"
            out.append(fields)
            fields = {}
    assert not fields
    return out


def by_openai_chat(events: list[Any]) -> Any:
    state = ChatCompletionStreamState()
    for one in events:
        chunk = ChatCompletionChunk.model_validate(one)
        assert chunk.choices or one["usage"], "clients read the first choice"
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.model_dump()


def by_hand(events: list[Any]) -> Any:
    """Texts and the last finish of each choice of completions."""
    found: dict[int, list[Any]] = {}
    for one in events:
        whole = [{**choice, "finish_reason": "stop", "logprobs": None} for choice in one["choices"]]
        Completion.model_validate({**one, "choices": whole})
        for choice in one["choices"]:
            said = found.setdefault(choice["index"], ["", None])
            said[:] = [said[0] + choice["text"], choice["finish_reason"]]
    return found


def by_openai_responses(events: list[Any]) -> Any:
    state, reads = ResponseStreamState(input_tools=omit, text_format=omit), TypeAdapter[Any](ResponseStreamEvent)
    for one in events:
        if one["type"].startswith("response.reasoning_part"):
            continue  # vLLM's own, which no client knows
        state.handle_event(reads.validate_python(one))
    snapshot, whole = state._ResponseStreamState__current_snapshot, state._completed_response  # type: ignore[attr-defined]
    return snapshot.model_dump(warnings=False), whole and whole.model_dump(warnings=False)


def starting_anew(events: list[Any]) -> list[Any]:
    """The output as a client has it for which each response object is all there is."""
    output: list[Any] = []
    for one in events:
        kind, place = one["type"], one.get("output_index")
        if kind in ("response.created", "response.in_progress"):
            output = json.loads(json.dumps(one["response"]["output"]))
        elif kind == "response.output_item.added":
            assert place == len(output)
            output.append(json.loads(json.dumps(one["item"])))
        elif kind == "response.output_item.done":
            output[place] = one["item"]
        elif kind in ("response.content_part.added", "response.reasoning_part.added"):
            content = output[place]["content"] = output[place].get("content") or []
            assert one["content_index"] == len(content)
            content.append(dict(one["part"]))
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            output[place]["content"][one["content_index"]]["text"] += one["delta"]
        elif kind == "response.function_call_arguments.delta":
            output[place]["arguments"] += one["delta"]
    return output


def nothing_is_added_to_what_is_done(events: list[Any]) -> None:
    done = set[Any]()
    for one in events:
        place = one.get("output_index"), one.get("content_index")
        if one["type"].endswith(".done"):
            done |= {place}
        elif one["type"].endswith(".delta"):
            assert place not in done, one


def read(route: str, stream: bytes) -> Any:
    """Give what a client has in the end."""
    events = [json.loads(one["data"]) for one in strictly(stream) if one["data"] != "[DONE]"]
    if route == "/v1/responses":
        numbers = [one["sequence_number"] for one in events]
        assert numbers == [*range(len(events))]
        nothing_is_added_to_what_is_done(events)
        return by_openai_responses(events), starting_anew(events), {**events[-1], "sequence_number": 0}
    return by_hand(events) if route == "/v1/completions" else by_openai_chat(events)


@pytest.mark.parametrize("name", STREAMS)
def test_a_client_that_waited_has_the_same_in_the_end(name: str) -> None:
    asked, told = STREAMS[name]
    chunks, got = [chunk.encode() for chunk in told.chunks], []
    for waits in (False, True):
        running = exchange_of(asked)
        running.on_headers(told.status, told.headers["content-type"])
        got.append(played(running, chunks, waits=waits))
    plain, waited = got
    assert waited.startswith(COMMENT * 2) and len(strictly(waited)) > len(strictly(plain))
    assert read(told.route, waited) == read(told.route, plain)


@pytest.mark.parametrize("name", [
    name for name, (_, told) in STREAMS.items() if told.route == "/v1/chat/completions" and "-n" not in name
])  # fmt: skip
def test_a_messages_client_hears_pings(name: str) -> None:
    chunks = [chunk.encode() for chunk in STREAMS[name][1].chunks]
    plain, waited = (played(messages(), chunks, waits=waits) for waits in (False, True))
    assert waited.startswith(PING * 2) and waited.replace(PING, b"") == plain
    assert all(one["event"] == json.loads(one["data"])["type"] for one in strictly(waited))
    assert PING not in waited.partition(b"event: message_stop")[2]


def test_it_is_said_of_a_choice_that_goes_on() -> None:
    running = streaming({"n": 3})

    def said() -> tuple[int, Any]:
        [choice] = json.loads(running.keep_alive()[6:])["choices"]
        return choice["index"], choice["finish_reason"]

    running.feed(START + event(chat_start([1, 2], index=2)))
    assert said() == (0, None)
    running.feed(WORD + END)
    assert said() == (2, None), "what the client has heard of"
    running.feed(event(chat_event({}, index=2, ids=[5], logprobs=[-1.0], finish="stop")))
    assert said() == (1, None)
    assert running.feed(event(chat_event({"content": "a"}, index=1, ids=[5], logprobs=[-1.0], finish="stop"))) == []
    assert running.settled and said() == (1, None), "the client does not know that it has ended"
    running.release()
    assert running.keep_alive() == b"" == b"".join(running.feed(b"")) and running.feed(DONE)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES])
def test_an_engine_that_only_comments_says_nothing(path: str) -> None:
    running = messages() if path == MESSAGES else streaming(path=path)
    running.feed(b": keep-alive\n\n: keep-alive\n\n")
    assert not running.heard and running.keep_alive() == (PING if path == MESSAGES else COMMENT)


@pytest.mark.parametrize("events", [
    [], [("response.output_item.added", {"item": {"type": "message"}}), ("response.odd", {})], [("response.odd", {})],
    [("response.output_item.added", {"item": {"type": "message"}}), ("response.content_part.added", {"part": {}})],
    [("response.output_text.done", {"content_index": 0, "text": ""})],
    [("response.output_item.added", {"item": {"type": "message"}}), ("response.output_text.done", {"text": ""})],
    [("response.output_item.added", {"item": {}}), ("response.content_part.done", {"content_index": 1, "part": [1]})],
])  # fmt: skip
def test_a_response_that_is_not_understood_gets_a_comment(events: list[tuple[str, Any]]) -> None:
    running = streaming(path="/v1/responses")
    begun = {"type": "response.created", "response": {"id": "resp_1", "output": []}}
    for kind, fields in [("response.created", begun), *events] if events else []:
        running.feed(event({**fields, "type": kind}))
    assert running.keep_alive() == COMMENT


def test_an_engine_that_does_not_number_its_events_gets_none_numbered() -> None:
    running = streaming(path="/v1/responses")
    begun = {"type": "response.created", "response": {"id": "resp_1", "output": []}}
    running.feed(event(begun))
    assert running.keep_alive() == b"event: response.in_progress\n" + event({**begun, "type": "response.in_progress"})
    numbered = event({"type": "response.odd", "sequence_number": 1})
    assert running.feed(numbered) == [numbered]
    running.feed(event({**begun, "sequence_number": 2}))
    running.keep_alive()
    assert running.feed(b"data: [DONE]\n\n" + event({"type": "response.odd"})) == [
        b"data: [DONE]\n\n", event({"type": "response.odd"})
    ]  # fmt: skip


def test_a_response_that_waits_where_its_last_piece_came_the_fast_way() -> None:
    """Once an event of our own is in, pieces take the slow way, since they are numbered anew."""
    running = streaming(path="/v1/responses")
    running.feed(event({"type": "response.created", "response": {"id": "r", "output": []}, "sequence_number": 0}))

    def piece(number: int) -> bytes:
        fields = {"content_index": 0, "delta": "a", "item_id": "m", "logprobs": [], "output_index": 0}
        told = {**fields, "sequence_number": number, "type": "response.output_text.delta"}
        return b"event: response.output_text.delta\n" + event(told)

    assert running.feed(piece(1)) == [piece(1)]
    assert running.keep_alive() == piece(2).replace(b'"delta":"a"', b'"delta":""')
    assert b"".join(running.feed(piece(2))) == piece(3)


@pytest.mark.parametrize("bad", [b"nonsense", b"[1]", b"[" * 100_000])
def test_a_response_that_waits_behind_a_piece_that_is_no_json_gets_a_comment(bad: bytes) -> None:
    running = streaming(path="/v1/responses")
    running.feed(event({"type": "response.created", "response": {"id": "r", "output": []}}))
    piece = b"event: response.reasoning_text.delta\ndata: %b\n\n" % bad
    assert running.feed(piece) == [piece]
    assert running.keep_alive() == running.keep_alive() == COMMENT


@pytest.mark.parametrize("event", [b"data: {}\n\n", b"data: nonsense\n\n", b"no event"])
def test_an_event_that_has_no_number_leaves_as_it_is(event: bytes) -> None:
    reading = ResponseReading(Ask())
    assert reading.leaving(event) is event
    reading.put_in = 1
    assert reading.leaving(event) is event
