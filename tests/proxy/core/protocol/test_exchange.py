"""The exchange: what goes to the engine, what leaves when, and that a failed capture costs the agent nothing."""

from __future__ import annotations

import json
import random
import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol import exchange as machine
from ajet_proxy.core.protocol.dialect import Ask
from ajet_proxy.core.protocol.exchange import Exchange, question
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_sdk.errors import BadRequest
from tests.fuzz.mutations import pieces
from tests.proxy.core.protocol.answers import (
    CHAT,
    COMPLETIONS,
    SSE,
    chat_event,
    chat_start,
    dump,
    event,
    exchange,
    ids_of,
    reasons,
)
from tests.proxy.core.streams import DONE, END, SEEN_END, SEEN_START, SEEN_WORD, START, USAGE, WORD, run, streaming

MESSAGES = "/v1/messages"
TOLD = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

# --- the request


def test_what_another_policy_version_has_put_into_the_prefix_cache_is_not_for_this_one() -> None:
    running = exchange(CHAT, {"logprobs": True, "return_token_ids": True})
    running.under(0, 0.0)
    assert (running.altered, running.cache_salt) == ((), None)
    running.under(3, 1.5)
    assert (running.altered, running.cache_salt) == (("cache_salt",), "#3.1500")
    assert json.loads(running.upstream_body())["cache_salt"] == "#3.1500"
    assert json.loads(running.upstream_body(seed="1"))["cache_salt"] == "#3.1500"


def test_a_clients_own_salt_stays_a_part_of_it_and_is_all_of_it_where_the_question_is_put_as_it_came() -> None:
    running = exchange(CHAT, {"cache_salt": "mine"})
    running.under(3, 1.5)
    assert running.altered == ("return_token_ids", "logprobs", "cache_salt")
    assert json.loads(running.upstream_body())["cache_salt"] == "mine#3.1500"
    assert running.retreat()
    assert running.upstream_body() == b'{"model":"policy","cache_salt":"mine"}'
    assert not running.retreat()


def test_the_request_stays_as_it_was_written() -> None:
    body = b'{ "model":"policy",\n "temperature": 0.70, "x":1e2,"messages":[{"content":"\\u00e9"}], "logprobs":null }'
    running = Exchange(CAPTURED[CHAT], JsonBody(body))
    expected = body.replace(b'"logprobs":null }', b'"logprobs":true ,"return_token_ids":true}')
    assert running.upstream_body() == expected
    assert running.altered == ("return_token_ids", "logprobs")


def test_the_episodes_model_stands_in_for_another() -> None:
    running = exchange(CHAT, {"logprobs": True, "return_token_ids": True}, model='other "é"')
    assert json.loads(running.upstream_body())["model"] == 'other "é"'
    assert running.altered == ("model",)
    assert exchange(CHAT, model="policy").altered == ("return_token_ids", "logprobs")


def test_an_engine_that_tells_versions_is_asked_for_them() -> None:
    asked = JsonBody(b'{"model":"policy"}')
    for path in (CHAT, COMPLETIONS):
        running = Exchange(CAPTURED[path], asked, versions=True)
        assert json.loads(running.upstream_body())["return_weight_versions"] is True
        assert running.altered == ("return_token_ids", "logprobs", "return_weight_versions")
        assert not running.reader.tells_versions


def test_each_event_leaves_at_once_and_the_last_one_waits() -> None:
    running = streaming()
    assert running.feed(START + WORD[:9]) == [SEEN_START]
    assert running.feed(WORD[9:]) == [SEEN_WORD]
    assert not running.settled and running.outcomes == () and running.reader.sampled == (1,)
    assert running.feed(END + USAGE) == []
    assert running.settled and ids_of(running.outcomes) == [(5, 6)], "nobody waits for [DONE]"
    assert running.feed(DONE) == [], "what follows the end may not overtake it"
    assert running.release() == [SEEN_END, USAGE, DONE]
    assert running.feed(USAGE) == [USAGE]
    assert running.feed(b"tail") == []
    assert running.release() == []
    assert running.finish() == [b"tail"]


@given(st.integers(0, 10**9), st.sampled_from((1, 2)))
def test_no_split_matters(seed: int, n: int) -> None:
    told = {
        START: SEEN_START,
        event(chat_start([1, 2], index=1)): event(chat_start(None, index=1)),
        WORD: SEEN_WORD,
        b": ping\r\n\r\n": b": ping\r\n\r\n",
        event(chat_event({}, ids=[9], logprobs=[-3])): b"",
        event(chat_event({"content": "x"}, index=1, ids=[7], logprobs=[-1], finish="length")): event(
            chat_event({"content": "x"}, index=1, finish="length")
        ),
        END: SEEN_END,
        USAGE: USAGE,
        DONE: DONE,
    }
    told = {sent: seen for sent, seen in told.items() if n == 2 or b'"index":1' not in sent}
    stream = b"".join(told)
    whole = run([stream], streaming({"n": n}))
    assert whole[0] + whole[1] == b"".join(told.values())
    for split in (pieces(stream, random.Random(seed)), [stream[i : i + 1] for i in range(len(stream))]):
        early, late, outcomes = run(split, streaming({"n": n}))
        assert (early + late, outcomes) == (whole[0] + whole[1], whole[2])
        assert SEEN_END not in early and DONE not in early
    assert ids_of(whole[2])[0] == (5, 9, 6)


def test_an_end_without_its_blank_line_is_an_end() -> None:
    early, late, outcomes = run([START + WORD, END[:-1]], streaming())
    assert (early, late) == (SEEN_START + SEEN_WORD, SEEN_END[:-1])
    assert ids_of(outcomes) == [(5, 6)]


def test_a_stream_that_just_stops_is_truncated() -> None:
    for rest in (b"", b": half a comment", b'data: {"choices":'):
        early, late, outcomes = run([START + WORD + rest], streaming())
        assert early + late == SEEN_START + SEEN_WORD + rest
        assert reasons(outcomes) == ["capture_failed" if rest.startswith(b"data") else "truncated"]


def test_a_stream_that_is_cut_gives_what_came() -> None:
    running = streaming({"n": 2})
    assert running.feed(START + WORD + END[:20]) == [SEEN_START, SEEN_WORD]
    assert running.abort("disconnected") == [END[:20]]
    assert reasons(running.outcomes) == ["disconnected", "disconnected"]
    assert running.abort() == []


# --- documents, refusals, and what is not captured


def test_a_document_is_kept_back_as_a_whole() -> None:
    running = exchange(CHAT)
    running.on_headers(200, "application/json")
    assert running.buffered
    assert running.feed(b'{"choices":') == []
    assert running.feed(b"[]}") == []
    assert not running.settled
    assert running.finish() == [b'{"choices":[]}']
    assert reasons(running.outcomes) == ["truncated"]


def test_the_engines_refusal_passes_untouched() -> None:
    running = exchange(CHAT, {"n": 2})
    running.on_headers(400, "application/json")
    assert running.settled and not running.buffered
    assert reasons(running.outcomes) == ["refused", "refused"]
    body = dump({"error": {"message": "é"}, "choices": [{"token_ids": [1]}]}).encode()
    assert running.feed(body) == [body]
    assert running.finish() == []


def test_what_is_not_captured_still_goes_to_the_episodes_model() -> None:
    running = exchange(COMPLETIONS, {"echo": True}, model="other")
    assert running.altered == ("model",)
    assert json.loads(running.upstream_body()) == {"model": "other", "echo": True}


def test_a_refused_question_is_put_again_as_the_client_put_it() -> None:
    running = exchange(CHAT, {"n": 2}, model="other")
    assert json.loads(running.upstream_body(seed="1")) == json.loads(running.upstream_body()) | {"seed": 1}
    assert running.retreat()
    assert running.upstream_body() == b'{"model":"other","n":2}'
    assert not running.retreat()
    running.on_headers(200, SSE)
    assert reasons(running.outcomes) == ["unaskable"] * 2
    assert running.feed(WORD) == [WORD]


def test_a_question_with_nothing_added_is_not_put_again() -> None:
    assert not exchange(CHAT, {"logprobs": True, "return_token_ids": True}).retreat()
    assert not exchange(COMPLETIONS, {"echo": True}).retreat()


@pytest.mark.parametrize(("path", "asked", "choices"), [
    (CHAT, {"n": 3}, 3), (CHAT, {"n": "3"}, 3), (CHAT, {"n": 10**30}, 10**30), (CHAT, {"n": 3, "echo": True}, 3),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, 6),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 10**30, "echo": True}, 2 * 10**30),
])  # fmt: skip
def test_a_request_asks_for_no_more_choices_than_it_may(path: str, asked: dict[str, Any], choices: int) -> None:
    """However many it asks for, nothing is made of them before that is known."""
    dialect, request = CAPTURED[path], JsonBody(json.dumps(asked).encode())
    if choices < 10:
        assert Exchange(dialect, request, ask=question(dialect, request, choices)).choices == choices
    most = min(choices - 1, 1024)
    with pytest.raises(BadRequest, match=rf"{most} choices at most, n times") as caught:
        question(dialect, request, most)
    assert (caught.value.code, caught.value.param) == ("too_many_choices", "n")


def test_a_request_that_is_not_carried_goes_out_as_it_is() -> None:
    body = b'{ "model": "m", "messages": [{"role": "user", "content": [{"type": "document"}]}] }'
    running = Exchange(CAPTURED[MESSAGES], JsonBody(body), ask=Ask(skip="no_chat_route"), versions=True)
    assert (running.upstream_body(), running.altered, running.choices) == (body, (), 1)


def test_pieces_of_the_engines_answer_are_nothing_to_the_client_of_another_protocol() -> None:
    for content_type in (SSE, "application/json"):
        running = exchange(MESSAGES, TOLD)
        running.on_headers(200, content_type)
        running.feed(START[:-1])
        assert running.abort() == []
        assert reasons(running.outcomes) == ["truncated"]


@pytest.mark.parametrize(("content_type", "body", "seen"), [
    (SSE, DONE, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("application/json", b'{"error":{"type":"t","message":""}}', b'{"type":"error","error":{"type":"t","message":""}}'),
])  # fmt: skip
def test_what_is_not_captured_is_translated_too(content_type: str, body: bytes, seen: bytes) -> None:
    running = exchange(MESSAGES, TOLD, ask=Ask(skip="multimodal"))
    running.on_headers(200, content_type)
    assert reasons(running.outcomes) == ["multimodal"]
    assert running.feed(body) + running.finish() == [seen]


def test_a_stream_is_kept_alive_until_its_end() -> None:
    running = streaming()
    assert running.keep_alive() == b": waiting for the engine\n"
    running.feed(START + WORD[:9])
    assert running.keep_alive(), "nothing of a piece of an event has left"
    running.feed(WORD[9:] + END)
    assert running.keep_alive() and running.release() and not running.keep_alive()
    for status, content_type in ((200, "application/json"), (400, SSE)):
        other = exchange(CHAT)
        other.on_headers(status, content_type)
        assert not other.keep_alive()


# --- the states


ROW = re.compile(r"^ {4}(\w[a-z ]*\w)? +──([a-z ]+)──▶ +([a-z ]+)$", re.MULTILINE)


def test_the_docstring_draws_the_table() -> None:
    drawn, state = {}, ""
    for before, what, after in ROW.findall(str(machine.__doc__)):
        state = before or state
        drawn |= {(one, what): after for one in (get_args(machine.State) if state == "any" else [state])}
    assert drawn == machine.TRANSITIONS


def test_nothing_overtakes_an_event_that_was_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_EVENT", 1000)
    running = streaming()
    running.feed(START + WORD + END)
    assert running.state == "held"
    assert running.feed(b"x" * 2000) == running.feed(b"y") == []
    assert running.release() == [SEEN_END, b"x" * 2000, b"y"]
    assert running.feed(b"z") == [b"z"]
