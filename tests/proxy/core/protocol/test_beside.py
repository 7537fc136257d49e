"""Answers that are not captured: what is read beside them tells if their client was answered, and changes nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ajet_proxy.core.protocol.dialect import Ask
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import NO_CHAT_ROUTE
from tests.fuzz.mutations import pieces
from tests.proxy.core.protocol.answers import CHAT, COMPLETIONS, SSE, event, exchange

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
JSON = "application/json"
IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
BEAM, LATER = {"prompt": ["a", "b"], "use_beam_search": True}, {"input": "a", "background": True}
TOLD = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
ERROR = {"error": {"message": "unwell", "type": "InternalServerError", "code": 500}}
HTML = b"<html>bad gateway</html>"


def image() -> Exchange:
    return exchange(CHAT, IMAGE)


def beam() -> Exchange:
    """It asks for two answers, and is one call."""
    return exchange(COMPLETIONS, BEAM)


def later() -> Exchange:
    return exchange(RESPONSES, LATER)


def unaskable() -> Exchange:
    running = exchange(CHAT, TOLD)
    assert running.retreat()
    return running


def carried() -> Exchange:
    """An answer that is translated on its way."""
    return exchange(MESSAGES, TOLD, ask=Ask(skip="multimodal"))


def own() -> Exchange:
    running = exchange(MESSAGES, TOLD)
    running.pass_by()
    return running


PASSING = (image, beam, later, unaskable, own)


def of_chat(finish: Any, said: str = "delta", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, said: {"role": "assistant", "content": "a"}, "finish_reason": finish}
    return {"id": "c", "object": "o", "created": 1, "model": "m", "choices": [choice], **more}


def of_completions(*finish: Any) -> dict[str, Any]:
    choices = [{"index": place, "text": "a", "finish_reason": one} for place, one in enumerate(finish)]
    return {"id": "c", "object": "o", "created": 1, "model": "m", "choices": choices}


def of_responses(status: str, kind: str = "response.completed", **more: Any) -> dict[str, Any]:
    return {"type": kind, "response": {"id": "r", "status": status, "output": [], "error": None, **more}}


def of_own(reason: Any, *, stop: bool = True) -> bytes:
    delta = {"type": "message_delta", "delta": {"stop_reason": reason}}
    return event({"type": "message_start"}) + event(delta) + (event({"type": "message_stop"}) if stop else b"")


DONE = event("[DONE]")
STREAMS = [
    (image, event(of_chat(None)) + event(of_chat("stop")) + DONE, None),
    (image, event(of_chat("stop")), None),
    (image, event(of_chat("stop"))[:-2], None),
    (image, event(of_chat(None)) + DONE, "truncated"),
    (image, DONE, "truncated"), (image, b"", "truncated"), (image, b": waits\n\n", "truncated"),
    (image, event(of_chat("abort")) + DONE, "engine_aborted"),
    (image, event(of_chat("error")) + DONE, "engine_error"),
    (image, event(of_chat(None)) + event(ERROR) + DONE, "engine_error"),
    (image, event(of_chat("stop")) + event(ERROR), "engine_error"),
    (image, event(of_chat(None)) + b"data: no json\n\n", "capture_failed"),
    (image, event(of_chat(None)) + b"data: no json\n\n" + event(of_chat("stop")), None),
    (image, event(of_chat("stop")) + event(of_chat("stop", content="more")), None),
    (unaskable, event(of_chat(None)), "truncated"), (unaskable, event(of_chat("length")), None),
    (beam, event(of_completions("stop", "length")) + DONE, None),
    (beam, event(of_completions("stop", None)) + DONE, "truncated"),
    (beam, event(of_completions("stop", "abort")) + DONE, "engine_aborted"),
    (later, event(of_responses("completed")), None),
    (later, event(of_responses("in_progress", "response.created")), "truncated"),
    (later, event(of_responses("failed", "response.failed")), "engine_error"),
    (carried, event(of_chat("stop")) + DONE, None), (carried, event(of_chat(None)) + DONE, "truncated"),
    (carried, event(of_chat("abort")) + DONE, "engine_aborted"), (carried, event(ERROR), "engine_error"),
    (own, of_own("end_turn"), None), (own, of_own("end_turn") + DONE, None),
    (own, of_own("end_turn", stop=False), "truncated"), (own, of_own(None), "truncated"),
    (own, event({"type": "message_start"}) + event({"type": "error", "error": {}}), "engine_error"),
    (own, of_own("abort"), "engine_aborted"), (own, event(7), "capture_failed"), (own, b"", "truncated"),
]  # fmt: skip
DOCUMENTS = [
    (image, of_chat("stop", "message"), None), (image, of_chat(None, "message"), "truncated"),
    (image, of_chat("abort", "message"), "engine_aborted"), (image, {"choices": []}, "truncated"),
    (image, of_chat("stop", "message", prompt_logprobs=[None] * 5000), None),
    (beam, of_completions("stop", "stop"), None), (beam, of_completions("stop"), "truncated"),
    (unaskable, of_chat("stop", "message"), None),
    *((later, of_responses(status)["response"], None) for status in ("queued", "in_progress", "completed")),
    (later, of_responses("failed", error={"code": "server_error"})["response"], "engine_error"),
    (later, of_responses("incomplete")["response"], "truncated"),
    (carried, of_chat("stop", "message"), None), (carried, of_chat("abort", "message"), "engine_aborted"),
    (carried, ERROR, "engine_error"), (carried, {}, "capture_failed"), (carried, HTML, "capture_failed"),
    (own, {"type": "message", "stop_reason": "end_turn"}, None),
    (own, {"type": "message", "stop_reason": None}, "truncated"),
    (own, {"type": "error", "error": {"type": "overloaded_error"}}, "engine_error"),
    *((make, ERROR, "engine_error") for make in PASSING), *((make, {}, "truncated") for make in PASSING),
    *((make, HTML, "capture_failed") for make in PASSING), *((make, b"", "capture_failed") for make in PASSING),
    *((make, b"7", "capture_failed") for make in PASSING),
]  # fmt: skip
CASES = [
    *((make, SSE, body, reason) for make, body, reason in STREAMS),
    *((make, JSON, body if isinstance(body, bytes) else json.dumps(body).encode(), reason)
      for make, body, reason in DOCUMENTS),
]  # fmt: skip


@pytest.mark.parametrize(("make", "content_type", "body", "reason"), CASES)
def test_an_answer_that_is_not_captured_is_judged_by_its_end(
    make: Any, content_type: str, body: bytes, reason: str | None
) -> None:
    """However it is cut. What passes as it came does so piece by piece."""
    for split in ([body], pieces(body, random.Random(7)), [body[at : at + 1] for at in range(min(len(body), 5000))]):
        running = make()
        running.on_headers(200, content_type)
        assert running.settled and running.failed is None
        fed = [running.feed(piece) for piece in split]
        if make is not carried:
            assert fed == [[piece] for piece in split]
        if len(b"".join(split)) == len(body):
            rest = running.finish()
            assert make is carried or rest == []
            assert running.failed == reason


def test_an_error_in_a_stream_is_known_before_its_end() -> None:
    running = image()
    running.on_headers(200, SSE)
    running.feed(event(of_chat("abort")))
    assert running.failed == "engine_aborted"


@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_a_refusal_and_a_captured_answer_are_not_judged_here(content_type: str) -> None:
    for running, status in ((image(), 500), (exchange(CHAT, TOLD), 200)):
        running.on_headers(status, content_type)
        running.feed(json.dumps(ERROR).encode())
        running.finish()
        assert running.failed is None


@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_of_what_is_too_large_nothing_is_said(monkeypatch: pytest.MonkeyPatch, content_type: str) -> None:
    monkeypatch.setattr("ajet_proxy.core.protocol.exchange.MAX_EVENT", 1000)
    running, part = image(), b"data: " + b"x" * 600
    running.on_headers(200, content_type)
    for _ in range(3):
        assert running.feed(part) == [part]
    assert (running.finish(), running.failed) == ([], None)


def test_an_engine_of_the_clients_own_protocol_is_waited_for_in_it() -> None:
    running = own()
    running.on_headers(200, SSE)
    assert running.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert running.feed(of_own("end_turn")) and running.keep_alive() == b""
    assert [one.reason for one in running.outcomes] == [NO_CHAT_ROUTE]  # type: ignore[union-attr]


def test_the_answer_of_the_clients_own_route_is_read_in_its_dialect() -> None:
    """Only that of messages is no other dialect's. It tells no tokens, and has no fast way."""
    for path, dialect in CAPTURED.items():
        same = type(dialect.own_reader(Ask())) is type(dialect.reader(Ask()))
        assert same == (path != MESSAGES)
    reader = own().reader
    assert reader.sampled == (0,)
    assert reader.usual(b"event: ping\n") == ([], 0)
