"""The history of a response: known by its items, or by the name of the response before; and its marks in journals."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from ajet_proxy.core.conversation.history import Mark, marks_of, read
from ajet_proxy.core.protocol.responses.history import ResponseHistory
from ajet_proxy.core.trajectory.call import Captured

SCOPE = b"s" * 32
CAPTURED = Captured(0, "m", (1, 2), (3,), (-0.5,), "stop")


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


ASKED = {"instructions": "You help.", "input": "guess"}
SAID = [
    item("reasoning", id="rs-1", content=[{"type": "reasoning_text", "text": "well"}]),
    item("message", id="msg-1", role="assistant", content=[{"type": "output_text", "text": "ok", "annotations": []}]),
    item("function_call", id="fc-1", call_id="call-1", name="f", arguments='{"b": 1, "a": 2}', status="completed"),
]
RESULT = item("function_call_output", call_id="call-1", output="7")
AGAIN = [{"role": "user", "content": [{"type": "input_text", "text": "guess"}]}, *SAID]


def response(request: dict[str, Any]) -> ResponseHistory:
    history = read(ResponseHistory, request, SCOPE)
    assert isinstance(history, ResponseHistory)
    return history


def responds_to(request: dict[str, Any], said: list[Any], later: dict[str, Any]) -> bool:
    marks = response(request).after({"id": "resp-1", "output": said}, CAPTURED)
    return any(mark.key in {one.key for one in marks} for mark in response(later).beginnings((0,)))


@pytest.mark.parametrize("again", [
    AGAIN, [{"role": "user", "content": "guess"}, *SAID[1:]], [*AGAIN[:2], {**SAID[1], "id": None}, *SAID[2:]],
    [*AGAIN[:3], {**SAID[2], "arguments": '{"a":2,"b":1}', "call_id": "mine"}],
])  # fmt: skip
def test_a_response_is_known_by_its_items(again: list[Any]) -> None:
    assert responds_to(ASKED, SAID, {**ASKED, "input": [*again, RESULT]})
    assert not responds_to(ASKED, SAID, {**ASKED, "input": [*again[:-1], RESULT]})
    assert not responds_to(ASKED, SAID, {"input": [*again, RESULT]})


def test_a_response_is_known_by_its_name() -> None:
    assert responds_to(ASKED, SAID, {"previous_response_id": "resp-1", "input": [RESULT]})
    assert not responds_to(ASKED, SAID, {"previous_response_id": "resp-2", "input": [*AGAIN, RESULT]})
    later = {**ASKED, "previous_response_id": "resp-0"}
    assert responds_to(later, SAID, {"previous_response_id": "resp-1", "input": "more"})
    assert not responds_to(later, SAID, {**ASKED, "input": AGAIN})


def test_other_items_count_as_they_stand() -> None:
    search = item("web_search_call", id="ws-1", status="completed", action={"query": "guess"})
    compacted = item("compaction", id="cmp-1", encrypted_content="x")
    more = {**ASKED, "input": [compacted, *AGAIN]}
    assert responds_to(more, [search], {**ASKED, "input": [compacted, *AGAIN, {**search, "id": "ws-2"}]})
    assert not responds_to(more, [search], {**ASKED, "input": [*AGAIN, search]})
    assert not responds_to(more, [search], {**ASKED, "input": [compacted, *AGAIN, {**search, "action": {}}]})


def test_only_what_follows_one_response_is_alike() -> None:
    assert len({response({"input": "guess", "previous_response_id": one}).kind for one in (None, "r1", "r2")}) == 3


@pytest.mark.parametrize("said", [{}, {"input": 7}, {"input": [7]}, {"input": [{"type": 7}]}])
def test_what_is_malformed_is_known_by_no_words(said: dict[str, Any]) -> None:
    for exact in (True, False):
        history = read(ResponseHistory, said, SCOPE, exact=exact)
        found = [] if history is None else [*history.beginnings(()), *marks(history, [])]
        assert all(mark.key.startswith("response:") for mark in found)


def marks(history: Any, output: Any) -> tuple[Mark, ...]:
    return marks_of(history, {"id": "resp-1", "output": output}, CAPTURED)


@pytest.mark.parametrize("said", [{}, {"role": "user"}, True, 7, None])
def test_only_a_list_is_a_list_of_items(said: Any) -> None:
    """Also behind a response that is named: what follows it is read too."""
    assert read(ResponseHistory, {"input": said, "previous_response_id": "r1"}, SCOPE) is None


def test_an_answer_that_cannot_be_told_leaves_no_mark() -> None:
    assert marks(response(ASKED), None) == () == marks_of(response(ASKED), {}, CAPTURED)


def test_words_may_be_known_where_the_text_is_not() -> None:
    unread = response({"input": [SAID[1], {"type": "item_reference", "id": "m"}]})
    assert not unread.exact and len(list(unread.beginnings(()))) == 1


# --- on disk: an open episode is continued after a restart, so the digests never change

RESPONSE: dict[str, Any] = {"model": "m", "instructions": "You help.", "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "guess"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "games", "arguments": "{ }"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "8"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "q"}},
    {"type": "compaction", "id": "cmp", "encrypted_content": "x"},
]}  # fmt: skip
OUTPUT = {"id": "resp-2", "output": RESPONSE["input"][1:4]}


@pytest.mark.parametrize(("request_", "before", "after", "digest"), [
    (RESPONSE, 3, 2, "ae3e6b132b13359403d48c72"), ({"input": "guess"}, 0, 2, "819b75652b71486ffc7f2be0"),
    ({"previous_response_id": "resp-1", "input": "more"}, 1, 1, "c894ea3bf15ea0eb17d2a486"),
])  # fmt: skip
def test_a_history_has_these_marks(request_: dict[str, Any], before: int, after: int, digest: str) -> None:
    history = response(request_)
    begins, ends = list(history.beginnings({4, 8, 12})), list(history.after(OUTPUT, CAPTURED))
    found = sha256(repr([*begins, *ends]).encode()).hexdigest()[:24]
    assert (len(begins), len(ends), found) == (before, after, digest)
