"""The long lists of a document: what is taken is what JSON reads, and whatever they do not know is read as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol import long_documents
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.json_edits import scan
from ajet_proxy.core.protocol.reading import Reading

TEXTS = st.text(max_size=12) | st.sampled_from(['"token_ids":[1]', '"logprobs":{"content":[', ']},"finish_reason":'])
TOKENS = st.integers(0, 2**31 - 1)
SAMPLED = st.lists(st.tuples(TEXTS, TOKENS, st.floats(-9999.0, 0.0)), max_size=5)


def body_of(sampled: list[tuple[str, int, float]], prompt: list[int], text: str, **more: Any) -> dict[str, Any]:
    """A chat document in vLLM's order; `more` are fields of its choice."""
    rows = [{"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []} for token, _, logprob in sampled]
    choice = {
        "index": 0, "message": {"role": "assistant", "content": text}, "logprobs": {"content": rows},
        "finish_reason": "stop", "stop_reason": None, "token_ids": [token for _, token, _ in sampled], **more,
    }
    return {"id": "x", "model": "tiny", "choices": [choice], "usage": {"total_tokens": 3}, "prompt_token_ids": prompt}


def written(document: Any, *, escaped: bool = True) -> bytes:
    return json.dumps(document, ensure_ascii=escaped, separators=(",", ":")).encode("utf-8", "replace")


@given(SAMPLED, st.lists(TOKENS, max_size=5), TEXTS, st.booleans())
def test_what_is_taken_is_what_json_reads(
    sampled: list[tuple[str, int, float]], prompt: list[int], text: str, escaped: bool
) -> None:
    body = written(body_of(sampled, prompt, text), escaped=escaped)
    ask = CHAT.ask({})
    fast, slow = Reading(CHAT, ask), Reading(CHAT, ask)
    slow._hides_all = False  # which nothing is taken for
    assert fast.document(body) == slow.document(body)
    assert (fast.outcomes(), fast.answers()) == (slow.outcomes(), slow.answers())
    taken = long_documents.read(body, long=True, spans=True)
    assert len(taken.logprobs) == len(sampled)


@pytest.mark.parametrize("spans", [True, False])
def test_the_lists_are_out_of_the_text(spans: bool) -> None:
    document = body_of([("a", 5, -0.5), ("b", 6, -1.25)], [1, 2], "ab")
    text, answer, logprobs = long_documents.read(written(document), long=True, spans=spans)
    document["prompt_token_ids"] = None
    document["choices"][0] |= {"token_ids": None, "logprobs": None}
    assert (json.loads(text), logprobs) == (document, [-0.5, -1.25])
    assert answer.values["prompt_token_ids"] == (1, 2)
    assert answer.values["choices"][0].values["token_ids"] == (5, 6)
    assert bool(answer.spans) == spans


def test_nothing_is_taken_where_the_client_wants_to_see_it() -> None:
    body = written(body_of([("a", 5, -0.5)], [1], "a"))
    assert long_documents.read(body, long=False, spans=True) == (body.decode(), scan(body.decode(), deep="choices"), [])


ONE = [("a", 5, -0.5)]
PLAIN = body_of(ONE, [1], "a")
CHOICE = PLAIN["choices"][0]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": None},
        PLAIN | {"prompt_token_ids": None},
        PLAIN | {"prompt_token_ids": [1.5]},
        PLAIN | {"prompt_token_ids": [2**40]},
        PLAIN | {"choices": [CHOICE, CHOICE]},
        PLAIN | {"choices": [CHOICE, {"index": 1}]},
        PLAIN | {"choices": {"0": CHOICE}},
        {"prompt_token_ids": [1]} | PLAIN,
        PLAIN | {"choices": [{"token_ids": CHOICE["token_ids"]} | CHOICE]},
        PLAIN | {"choices": [dict(reversed(CHOICE.items()))]},
        PLAIN | {"prompt_token_ids": [-1]},
        body_of(ONE, [1], "a", token_ids=None),
        body_of(ONE, [1], "a", token_ids=None, more={"token_ids": [5]}),
        body_of(ONE, [1], "a", message={"content": "a", "token_ids": [5]}),
        body_of(ONE, [1], "a", logprobs=None),
        body_of(ONE, [1], "a", logprobs={"content": [{"token": "a"}]}),
        {"choices": [{"message": {k: v for k, v in CHOICE.items() if k != "message"}}], "prompt_token_ids": [1]},
        {"inner": {"prompt_token_ids": [1]}, "choices": [CHOICE], "more": {"prompt_token_ids": [2]}},
        {"choices": [CHOICE], "inner": {"prompt_token_ids": [1]}},
    ],
)  # fmt: skip
def test_any_other_form_is_read_as_json(document: dict[str, Any]) -> None:
    body = written(document)
    assert long_documents.read(body, long=True, spans=False) == (body.decode(), scan(body.decode(), deep="choices"), [])


@pytest.mark.parametrize(
    ("value", "otherwise"),
    [
        (b'"token_ids":[5]}]', b'"token_ids" :[5]}],"token_ids":[9]'),
        (b'"prompt_token_ids":[1]}', b'"prompt_token_ids" :[1],"inner":{"prompt_token_ids":[9]}}'),
        (b'"index":0', b'"index":0,"prompt_token_ids" :[9]'),
        (b'"index":0', rb'"index":0,"\u0070rompt_token_ids":[9]'),
        (b'"token_ids":[5]', rb'"y,\"token_ids":[9],"token_ids" :null'),
        (b'"logprobs":{', b'"inner":{"logprobs":{"content":[{"logprob":-1}]},"finish_reason":1},"logprobs":{'),
    ],
)
def test_a_namesake_elsewhere_is_not_taken_for_a_value_that_is_written_otherwise(
    value: bytes, otherwise: bytes
) -> None:
    body = written(PLAIN).replace(value, otherwise)
    assert long_documents.read(body, long=True, spans=False) == (body.decode(), scan(body.decode(), deep="choices"), [])


@pytest.mark.parametrize(
    ("old", "new"),
    [(b",{", b", {"), (b"-0.5", b"-1e2"), (b"-0.5", b"-7"), (b'"bytes":null', b'"bytes":[97],"more":{"logprob":1}'),
     (b'"top_logprobs":[]', b'"top_logprobs":[{"token":"]},","logprob":-1}]')],
)  # fmt: skip
def test_a_row_may_have_any_form_that_tells_a_logprob(old: bytes, new: bytes) -> None:
    body = written(body_of([*ONE, *ONE], [1], "a")).replace(old, new)
    rows = json.loads(body)["choices"][0]["logprobs"]["content"]
    assert long_documents.read(body, long=True, spans=False).logprobs == [row["logprob"] for row in rows]


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"-0.5", b"-00.5"), (b"-0.5", b"NaN"), (b"-0.5", b"-1e999"), (b":-0.5", b':"-0.5"'), (b"-0.5", b"null"),
     (b'"bytes":null', b'"bytes":[97,,98]'), (b'"token":"a"', b'"token":"\\ud800"'), (b'"logprob":-0.5,', b"")],
)  # fmt: skip
def test_a_row_of_another_form_is_left_to_json(old: bytes, new: bytes) -> None:
    body = written(body_of([*ONE, *ONE], [1], "a")).replace(old, new)
    try:
        expected: Any = repr(scan(body.decode(), deep="choices"))
    except ValueError:
        expected = "None"
    assert repr(read(body)) == expected


def read(body: bytes) -> Any:
    try:
        return long_documents.read(body, long=True, spans=False).answer
    except ValueError:
        return None


def test_what_is_cut_off_or_no_text_is_refused() -> None:
    body = written(PLAIN)
    assert [read(body[:end]) for end in range(len(body))] == [None] * len(body)
    with pytest.raises(UnicodeDecodeError):
        long_documents.read(body.replace(b'"a"', b'"\xff"'), long=True, spans=False)
