"""Engines that break the rules: a capture that fails costs the agent nothing, and the rest is put back all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.core.protocol.answers import CHAT, chat_event, chat_start, document, event, ids_of, reasons
from tests.proxy.core.streams import DONE, END, SEEN_END, SEEN_START, SEEN_WORD, START, USAGE, WORD, run, streaming


@pytest.mark.parametrize("bad", [
    b"data: no json\n\n", b"data: \xff\n\n", b"data: []\n\n", b"data: [DONE]x\n\n", b'data: {"choices":[7]}\n\n',
    b"data: " + b'{"a":' + b"[" * 100_000 + b"\n\n",
])  # fmt: skip
def test_what_cannot_be_read_passes_as_it_came(bad: bytes) -> None:
    rest = WORD + END + DONE
    for parts in ([START + WORD + bad + rest], [START, WORD, bad[:4], bad[4:], rest[:-3], rest[-3:]]):
        early, late, outcomes = run(parts, streaming())
        assert early == SEEN_START + SEEN_WORD
        assert late == bad + SEEN_WORD + SEEN_END + DONE, "what comes later is put back all the same"
        assert reasons(outcomes) == ["capture_failed"]


@pytest.mark.parametrize(("bad", "seen"), [
    (b'{"choices":[{"index":5,"token_ids":[1]}]}', b'{"choices":[{"index":5,"token_ids":null}]}'),
    (b'{"choices":[{}]}', None), (b'{"choices":7}', None), (b'{"choices":{"a":1}}', None),
    (b'{"choices":[{"index":0,"token_ids":3}]}', b'{"choices":[{"index":0,"token_ids":null}]}'),
    (b'{"choices":[{"index":0,"logprobs":3}]}', b'{"choices":[{"index":0,"logprobs":null}]}'),
    (b'{"choices":[{"index":0,"logprobs":{"content":[1]}}]}', b'{"choices":[{"index":0,"logprobs":null}]}'),
])  # fmt: skip
def test_a_capture_that_fails_costs_the_agent_nothing(bad: bytes, seen: bytes | None) -> None:
    early, late, outcomes = run([START + WORD + b"data: %b\n\n" % bad, WORD + END + DONE], streaming())
    assert early == SEEN_START + SEEN_WORD + b"data: %b\n\n" % (seen or bad) + SEEN_WORD
    assert late == SEEN_END + DONE
    assert reasons(outcomes) == ["capture_failed"]


def test_what_comes_after_the_end_is_put_back_too() -> None:
    running = streaming()
    assert running.feed(START + WORD + END + DONE + WORD) == [SEEN_START, SEEN_WORD]
    assert running.feed(WORD) == []
    assert running.release() == [SEEN_END, DONE, SEEN_WORD, SEEN_WORD]
    assert running.feed(END + DONE) == [SEEN_END, DONE]
    assert reasons(running.outcomes) == ["capture_failed"]


@pytest.mark.parametrize(("end", "reason"), [(b"", "captured"), (WORD, "capture_failed")])
def test_an_engine_that_breaks_off_between_the_finish_and_the_end(end: bytes, reason: str) -> None:
    running = streaming()
    running.feed(START + WORD + END + end)
    assert b"".join(running.abort()).startswith(SEEN_END) and reasons(running.outcomes) == [reason]


ADDED = chat_event({}, ids=[7], logprobs=[-1.0])
AGAIN = chat_event({}, ids=[], logprobs=[])


@pytest.mark.parametrize(("more", "reason"), [
    (event(ADDED), "capture_failed"),
    (event(chat_event({}, ids=[7], logprobs=[])), "capture_failed"),
    (event(chat_event({}, ids=[], logprobs=[-1.0])), "capture_failed"),
    (event(chat_event({"content": "x"})), "capture_failed"),
    (event(chat_event({"reasoning": "x"})), "capture_failed"),
    (event(chat_event({"tool_calls": [{"index": 0}]})), "capture_failed"),
    (event(AGAIN | {"choices": AGAIN["choices"] * 2}), "capture_failed"),
    (event(AGAIN | {"choices": 7}), "capture_failed"),
    (event(AGAIN | {"prompt_token_ids": [1, 3]}), "capture_failed"),
    (event(chat_event({}, finish="length")), "capture_failed"),
    (event(chat_event({}, finish="error")), "engine_error"),
    (event(chat_event({}, finish="abort")), "engine_aborted"),
    (event({"error": {"message": "unwell"}}), "engine_error"),
    (event(AGAIN), "captured"),
    (event(chat_event({"role": "assistant", "content": ""}, finish="stop")), "captured"),
    (event(chat_event({"content": None}, finish="")), "captured"),
    (event({"choices": [], "prompt_token_ids": [1, 2]}), "captured"),
    (event({"choices": [], "prompt_token_ids": []}), "captured"),
    (b"data: [DONE] \n\n", "captured"), (b"data:\n\n", "captured"), (b"data: \n\n", "captured"),
    (b"data: no json\n\n", "captured"), (b"data: []\n\n", "captured"), (b": ping\n\n", "captured"),
])  # fmt: skip
def test_calls_are_lost_by_what_contradicts_them_behind_the_end_and_by_nothing_else(more: bytes, reason: str) -> None:
    """Also when the client has the end; what is in one piece with the finish counts before the calls are settled."""
    running = streaming()
    running.feed(START + WORD + END)
    assert running.release() == [SEEN_END] and ids_of(running.outcomes) == [(5, 6)]
    for piece in (USAGE, more, USAGE, DONE):
        running.feed(piece)
    assert running.finish() == [] and reasons(running.outcomes) == [reason]
    assert running.contradicted == (None if reason == "captured" else reason)
    at_once = streaming()
    at_once.feed(START + WORD + END + more)
    assert at_once.settled and at_once.contradicted is None and reasons(at_once.outcomes) == [reason]


def test_a_contradiction_at_the_very_end_of_a_body_counts() -> None:
    running = streaming()
    running.feed(START + WORD + END)
    running.release()
    assert running.feed(event(ADDED)[:-1]) == [] and running.contradicted is None
    running.finish()
    assert running.contradicted == "capture_failed" and reasons(running.outcomes) == ["capture_failed"]


def test_a_choice_that_was_lost_before_keeps_its_reason() -> None:
    running = streaming({"n": 2})
    other = event(chat_event({}, index=1, ids=[7], logprobs=[-1.0], finish="error"))
    running.feed(START + event(chat_start([1, 2], index=1)) + WORD + other + END)
    assert reasons(running.outcomes) == ["captured", "engine_error"]
    running.release()
    running.feed(event(ADDED))
    assert reasons(running.outcomes) == ["capture_failed", "engine_error"]


def test_an_engine_that_is_not_vllm_is_passed_on_as_it_is() -> None:
    def foreign(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    start = foreign({"role": "assistant", "content": ""})
    parts = [start, foreign({"content": "a"}), foreign({}), foreign({}, "stop"), DONE]
    early, late, outcomes = run(parts, streaming())
    assert early == parts[0] + parts[1] + parts[2]
    assert late == parts[3] + DONE
    assert reasons(outcomes) == ["no_token_ids"]


@pytest.mark.parametrize(("path", "body"), [
    *((CHAT, body) for body in (b"", b"not json", b'"text"', b'{"choices":[1]}', b"\xff")),
    ("/v1/responses", b"<html>\xff"),
])  # fmt: skip
def test_a_document_that_cannot_be_read_passes_as_it_is(path: str, body: bytes) -> None:
    seen, outcomes = document(path, body)
    assert seen == body
    assert reasons(outcomes) == ["capture_failed"]


def test_an_event_that_does_not_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.protocol.exchange.MAX_EVENT", 1000)
    endless, running = b"x" * 600, streaming()
    assert running.feed(START + WORD + b"data: ") == [SEEN_START, SEEN_WORD]
    assert running.feed(endless) == []
    assert running.feed(endless) == [] and running.settled
    assert reasons(running.outcomes) == ["capture_failed"]
    assert running.release() == [b"data: " + 2 * endless]
    assert running.feed(endless) == [endless]
    assert (running.finish(), running.abort()) == ([], [])


def test_an_endless_event_behind_the_end_leaves_the_call_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.protocol.exchange.MAX_EVENT", 1000)
    running = streaming()
    running.feed(START + WORD + END + DONE)
    assert running.release() == [SEEN_END, DONE]
    assert running.feed(b"data: ") == []
    assert running.feed(b"x" * 2000) == [b"data: " + b"x" * 2000]
    assert ids_of(running.outcomes) == [(5, 6)]


def test_the_client_of_another_protocol_gets_nothing_of_an_endless_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.protocol.exchange.MAX_EVENT", 1000)
    running = streaming({"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}, "/v1/messages")
    assert running.feed(b"data: ") == running.feed(b"x" * 2000) == []
    assert running.settled and running.release() == [] == running.feed(b"x")
    assert reasons(running.outcomes) == ["capture_failed"]
