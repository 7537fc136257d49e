"""The bookkeeping of an answer: every way in which it can fail to be exact, and the fast way through a usual event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.chat import Chat
from ajet_proxy.core.protocol.completions import Completions
from ajet_proxy.core.protocol.dialect import Dialect, with_versions
from ajet_proxy.core.protocol.reading import Reading, joined
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured, Lost
from tests.kit import tapes
from tests.kit.steps import own_s
from tests.proxy.core.protocol.answers import (
    CHAT,
    COMPLETIONS,
    chat_event,
    chat_start,
    completion_event,
    document,
    dump,
    reasons,
    stream,
)

LOGPROBS = st.floats(-9999.0, 0.0)
TOKENS = st.integers(0, 2**31 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def reading(path: str, request: dict[str, Any] | None = None) -> Reading:
    dialect: Dialect = CAPTURED[path]
    return Reading(dialect, dialect.ask(request or {}))


@given(NAMES, st.none() | NAMES, LOGPROBS, TOKENS, st.booleans(), st.sampled_from(("content", "reasoning", "text")))
def test_the_fast_way_is_the_same_way(
    model: str, text: str | None, logprob: float, token: int, escaped: bool, word: str
) -> None:
    path, sampled = COMPLETIONS if word == "text" else CHAT, {"ids": [token], "logprobs": [logprob]}
    told = chat_event({} if text is None else {word: text}, **sampled)
    if path == COMPLETIONS:
        told = completion_event(text or "", **sampled)
    data = json.dumps({**told, "model": model}, ensure_ascii=escaped, separators=(",", ":")).encode()
    fast, slow = reading(path), reading(path)
    raw = b"data: %b\n\n" % data
    (seen, end), expected = fast.usual(raw), slow.event(data)
    assert end == len(raw)
    assert b"".join(seen) == (b"data: %b\n\n" % expected if expected is not None else b"")
    assert fast._choices == slow._choices
    assert joined(fast._choices[0].said) == joined(slow._choices[0].said)


def test_the_fast_way_is_taken_for_what_the_engine_really_sends() -> None:
    for path in (CHAT, COMPLETIONS):
        dialect = CAPTURED[path]
        assert isinstance(dialect, Chat | Completions)
        asked = [tape for (_, asker), tape in tapes.load().items() if asker == "proxy" and tape.route == path]
        data = [chunk.encode() for tape in asked if tape.stream for chunk in tape.chunks]
        taken = sum(bool(dialect.usual.fullmatch(item)) for item in data)
        assert taken > len(data) / 2, f"{taken} of {len(data)} events"


def test_the_fast_way_is_for_usual_events_alone() -> None:
    usual = b"data: %b\n\n" % dump(chat_event({"content": "a"}, ids=[5], logprobs=[-0.5])).encode()
    filler = b"data: %b\n\n" % dump(chat_event({}, ids=[6], logprobs=[-0.5])).encode()
    shown = b"data: %b\n\n" % dump(chat_event({"content": "a"})).encode()
    here = reading(CHAT)
    assert here.sampled == (0,)
    seen, end = here.usual(usual + filler + usual + b"data: [DONE]\n\n")
    assert b"".join(seen) == shown + shown and end == 2 * len(usual) + len(filler)
    assert here.sampled == (3,)
    assert here._choices[0].ids == [5, 6, 5] and here._choices[0].logprobs == [-0.5, -0.5, -0.5]
    for other in (usual[:-1], usual.replace(b'"index":0', b'"index":1'), b"data: [DONE]\n\n", b"\n" + usual, b""):
        assert here.usual(other) == ([], 0)
    for asking in ({"logprobs": True}, {"return_token_ids": True}):
        assert reading(CHAT, asking).usual(usual) == ([], 0)
    assert here._choices[0].ids == [5, 6, 5]


@pytest.mark.parametrize("word", [b"\xff", b"a\xc3", b"\x00", b"a\nb", b"\\q", b"\\u12", b"\\ud80"])
def test_the_fast_way_is_not_for_what_is_no_json(word: bytes) -> None:
    usual = b"data: %b\n\n" % dump(chat_event({"content": "WORD"}, ids=[5], logprobs=[-0.5])).encode()
    assert reading(CHAT).usual(usual)[1] == len(usual)
    assert reading(CHAT).usual(usual.replace(b"WORD", word)) == ([], 0)


def test_an_event_that_only_logprobs_called_for_is_taken_out_too() -> None:
    """Of an engine that knows no ids; an empty one for which nothing called stays."""
    filler, own = chat_event({}, logprobs=[-0.5]), chat_event({})
    seen, outcomes = stream(CHAT, [chat_start(None), filler, own, chat_event({}, logprobs=[-1.0], finish="stop")])
    assert len(seen) == 3
    assert [type(outcome) for outcome in outcomes] == [Lost]


def whole(**choice: Any) -> dict[str, Any]:
    told = {
        "index": 0, "message": {"role": "assistant", "content": "hi"},
        "logprobs": {"content": [{"token": "h", "logprob": -0.5}, {"token": "i", "logprob": -1e-7}]},
        "finish_reason": "stop", "token_ids": [3, 4],
    }  # fmt: skip
    top = {"prompt_token_ids": [1, 2], "prompt_text": None}
    return {"id": "x", "model": "policy", "choices": [{**told, **choice}], **top}


def test_a_document_keeps_every_other_character() -> None:
    text = dump(whole()).replace('"id":"x"', ' "id" : "\\u00e9", "x": 1.50e+2')
    seen, outcomes = document(CHAT, text.encode())
    expected = text.replace("[3,4]", "null").replace("[1,2]", "null")
    start, end = expected.index('{"content":['), expected.index(',"finish_reason"')
    assert seen.decode() == expected[:start] + "null" + expected[end:]
    assert outcomes == (Captured(0, "policy", (1, 2), (3, 4), (-0.5, -1e-7), "stop"),)


@pytest.mark.parametrize(("change", "reason"), [
    ({"token_ids": None}, "no_token_ids"), ({"logprobs": None}, "no_logprobs"),
    ({"logprobs": {"content": [{"logprob": -1.0}, {}]}}, "no_logprobs"), ({"finish_reason": None}, "truncated"),
    ({"token_ids": 7}, "capture_failed"), ({"index": 1}, "capture_failed"), ({"index": "0"}, "capture_failed"),
    ({"index": -1}, "capture_failed"),
])  # fmt: skip
def test_a_choice_that_is_not_exact_is_lost(change: dict[str, Any], reason: str) -> None:
    _, outcomes = document(CHAT, whole(**change))
    assert reasons(outcomes) == [reason]


def test_fewer_choices_than_asked_for_are_truncated_and_an_empty_error_is_none() -> None:
    assert reasons(document(CHAT, {**whole(), "error": None})[1]) == ["captured"]
    assert reasons(document(CHAT, whole(), {"n": 2})[1]) == ["truncated", "truncated"]
    assert reasons(document(CHAT, {"model": "m"})[1]) == ["truncated"]


def test_an_error_spoils_every_choice() -> None:
    error = {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}
    events = [
        chat_start([1], index=0), chat_start([1], index=1),
        chat_event({"content": "a"}, ids=[5], logprobs=[-0.5], finish="stop"), error, "[DONE]",
    ]  # fmt: skip
    seen, outcomes = stream(CHAT, events, {"n": 2})
    assert reasons(outcomes) == ["engine_error", "engine_error"]
    assert seen[-2:] == [error, "[DONE]"]
    assert reasons(document(CHAT, error)[1]) == ["engine_error"]


def test_what_a_choice_said_is_known_when_it_is_finished() -> None:
    here = reading(CHAT, {"n": 2})
    for told in (chat_event({"content": "é"}), chat_event({"content": "no"}, index=1), chat_event({}, finish="stop")):
        here.event(dump(told).encode())
    assert here.answers() == ({"content": "é"}, None)


@pytest.mark.parametrize("piece", [
    b'"content":"word"', {"content": "word"}, {"tool_calls": [{"index": 0, "function": {"arguments": "word"}}]},
])  # fmt: skip
def test_what_a_long_answer_said_is_put_together_once(piece: Any) -> None:
    assert "wordword" in json.dumps(joined([piece, piece]))
    assert own_s(lambda: joined([piece] * 200_000), 3) < 8 * own_s(lambda: joined([piece] * 50_000), 3)


SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]


def versions_of(spans: Any, asked: dict[str, Any] | None = None) -> tuple[Any, Any, Reading]:
    """The labels of a choice of two tokens that comes with `spans`, and what the client sees of them."""
    request = asked or {}
    reader = Reading(CAPTURED[CHAT], with_versions(CAPTURED[CHAT].ask(request), request))  # type: ignore[arg-type]
    for event in (chat_start([1]), chat_event({"content": "a"}, ids=[5], logprobs=[-0.5])):
        reader.event(dump(event).encode())
    last = chat_event({"content": "b"}, ids=[6], logprobs=[-0.5], finish="stop")
    last["choices"][0]["weight_versions"] = spans
    seen = json.loads(reader.event(dump(last).encode()) or b"")
    (outcome,) = reader.outcomes()
    assert isinstance(outcome, Captured)
    return outcome.labels, seen["choices"][0]["weight_versions"], reader


def test_the_weights_behind_each_token_are_kept_and_not_shown_to_who_did_not_ask() -> None:
    labels, seen, reader = versions_of(SPANS)
    assert (labels, seen, reader.tells_versions) == ((("3", 1), ("4", 1)), None, True)
    labels, seen, _ = versions_of(SPANS, {"return_weight_versions": True})
    assert (labels, seen) == ((("3", 1), ("4", 1)), SPANS)
    assert versions_of(None)[0] == ()


def test_the_fast_way_knows_the_null_of_an_engine_that_tells_versions() -> None:
    told = completion_event("a", ids=[5], logprobs=[-0.5])
    told["choices"][0]["weight_versions"] = None
    raw = b"data: %b\n\n" % dump(told).encode()
    seen, end = reading(COMPLETIONS).usual(raw)
    assert end == len(raw)
    shown = json.loads(b"".join(seen)[6:])["choices"][0]
    assert (shown["text"], shown["token_ids"], shown["weight_versions"]) == ("a", None, None)
