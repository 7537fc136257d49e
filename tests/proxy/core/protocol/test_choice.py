"""One choice: what makes it a call, and the reason for each that is none.

Which lists are logprobs: numbers that are no more than 0 but for rounding, and finite in 32 bits.

What a choice said is the same however the engine told it, and is what a client would send back.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.reading import PartialChoice, joined, logprobs_of
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured, Lost
from tests.kit import tapes
from tests.kit.record_tapes import PASSED

SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]


def partial(**other: Any) -> PartialChoice:
    return PartialChoice(**{"ids": [5, 6], "logprobs": [-0.5, -1], "finish_reason": "stop", "told": True, **other})


def test_a_choice_that_is_told_exactly_is_a_call() -> None:
    assert partial(stop_reason="END", versions=SPANS).outcome(3, "m", (1, 2)) == Captured(
        3, "m", (1, 2), (5, 6), (-0.5, -1.0), "stop", stop_string="END", labels=(("3", 1), ("4", 1))
    )
    assert partial(ids=[], logprobs=[]).outcome(0, "m", (1,)) == Captured(0, "m", (1,), (), (), "stop")
    assert partial(stop_reason=7).outcome(0, "m", ()) == Captured(0, "m", (), (5, 6), (-0.5, -1.0), "stop")


@pytest.mark.parametrize(("other", "prompt", "reason"), [
    ({"finish_reason": None}, (1,), "capture_failed"), ({"finish_reason": ["stop"]}, (1,), "capture_failed"),
    ({"finish_reason": "half \ud800"}, (1,), "capture_failed"),
    ({"finish_reason": "abort"}, (1,), "engine_aborted"), ({"finish_reason": "error"}, (1,), "engine_error"),
    ({"finish_reason": "error", "silent": True}, None, "engine_error"),
    ({"silent": True}, (1,), "no_token_ids"), ({"told": False}, (1,), "no_token_ids"), ({}, None, "no_token_ids"),
    ({}, [1, "x"], "capture_failed"), ({}, "absent", "capture_failed"), ({"ids": [5, -6]}, (1,), "capture_failed"),
    ({"logprobs": [-0.5]}, (1,), "no_logprobs"), ({"logprobs": [-0.5, None]}, (1,), "no_logprobs"),
    ({"logprobs": [-0.5, 0.5]}, (1,), "no_logprobs"), ({"logprobs": [-1e300, -0.5]}, (1,), "no_logprobs"),
])  # fmt: skip
def test_any_other_choice_is_lost_with_a_reason(other: dict[str, Any], prompt: Any, reason: str) -> None:
    assert partial(**other).outcome(1, "m", prompt) == Lost(1, reason)


@pytest.mark.parametrize("spans", [
    None, [], 7, ["3"], {"version": "3"}, SPANS[:1], [*SPANS, SPANS[0]], [SPANS[0], SPANS[0]], [SPANS[0], 1],
    [{"version": "3", "start": 0, "end": 3}], [{"version": 3, "start": 0, "end": 2}], [{"start": 0, "end": 2}],
    [{"version": "3", "start": 0, "end": "2"}], [{"version": "3", "start": 0, "end": 0}, *SPANS],
    [{"version": "3", "start": 0, "end": True}], [{"version": "\ud800", "start": 0, "end": 2}],
])  # fmt: skip
def test_weights_that_are_not_told_token_by_token_are_not_told(spans: Any) -> None:
    outcome = partial(versions=spans).outcome(0, "m", (1,))
    assert isinstance(outcome, Captured) and outcome.labels == ()


# --- test logprobs


@given(st.lists(st.floats(-9999.0, 9e-4)))
def test_what_engines_really_tell_stays_as_it_is(values: list[float]) -> None:
    told = logprobs_of(values)
    assert told == tuple(values) and repr(told) == repr(tuple(values))


@pytest.mark.parametrize("value", [-1, 0.0, -0.0, 1e-7, 9e-4, -9999.0, -3.4e38])
def test_whole_numbers_rounding_and_the_unlikely_are_logprobs(value: float) -> None:
    assert logprobs_of([value]) == (value,)


@pytest.mark.parametrize(
    "value",
    [
        0.5, 1.1e-3, 1e300, -1e300, 3.5e38, -3.5e38, math.inf, -math.inf, math.nan, True, "-1.0", None, [], {},
        "\ud83d", pytest.param(10**400, id="huge"),
    ],
)
def test_what_cannot_be_is_none_wherever_it_stands(value: Any) -> None:
    for values in ([value], [-1.0, value], [value, -1.0], [-1.0, value, 0.0]):
        assert logprobs_of(values) is None


@pytest.mark.parametrize("values", [None, 7, "x", {"a": 1}])
def test_what_is_no_list_is_none(values: Any) -> None:
    assert logprobs_of(values) is None
    assert logprobs_of([]) == ()


# --- test answer text


TOLD = [
    name for name in tapes.names()
    if tapes.load()[name, tapes.PROXY].status == 200 and "echo" not in name and name not in PASSED
]  # fmt: skip
IN_BOTH_WAYS = [name for name in TOLD if f"{name}-stream" in TOLD]


def given_by(name: str) -> list[dict[str, Any]]:
    """The words of the choices of a tape, without what is drawn anew for each answer."""
    asked, told = tapes.load()[name, tapes.AGENT], tapes.load()[name, tapes.PROXY]
    running = Exchange(CAPTURED[told.route], JsonBody(json.dumps(asked.request).encode()))
    running.on_headers(told.status, told.headers["content-type"])
    for chunk in told.chunks:
        running.feed(chunk.encode())
    running.finish()
    whole = [dict(one or {}) for one in running.answers]
    for one in whole:
        one["content"] = one.get("content") or None
        one["tool_calls"] = [
            (call["type"], call["function"]["name"], call["function"]["arguments"], bool(call["id"]))
            for call in one.get("tool_calls", ())
        ]
    return whole


@pytest.mark.parametrize("name", IN_BOTH_WAYS)
def test_a_stream_says_what_a_document_says(name: str) -> None:
    whole = given_by(name)
    assert given_by(f"{name}-stream") == whole
    text = json.loads(tapes.load()[name, tapes.PROXY].body)["choices"][0]
    assert whole[0]["content"] == (text.get("message", {}).get("content") or None)
    assert whole[0].get("text") == text.get("text")


def test_pieces_of_text_and_of_tool_calls_are_joined() -> None:
    pieces = [
        {"role": "assistant", "content": ""}, b'"reasoning":"h\\u00e9"', b'"reasoning":"m"', {"content": None},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": None}}]},
        {"tool_calls": [{"index": 1, "id": None, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 1, "id": "not this", "function": {"arguments": " 1}"}}]}, b'"content":"ok"',
    ]  # fmt: skip
    assert joined(pieces) == {
        "role": "assistant", "content": "ok", "reasoning": "hém",
        "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": ""}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
        ],
    }  # fmt: skip
    assert joined([{"role": "assistant", "tool_calls": None, "annotations": []}]) == {
        "role": "assistant", "annotations": [],
    }  # fmt: skip


@pytest.mark.parametrize("piece", [
    b'"content":"\x01"', b'"content":"\xff"', {"tool_calls": 7}, {"tool_calls": ["x"]}, ["no", "map"],
    {"tool_calls": [{"function": None}]}, {"tool_calls": [{"index": []}]}, {"tool_calls": [{"index": "x"}, {}]},
    {"tool_calls": [{"function": {"name": 1}}]},
])  # fmt: skip
def test_what_nobody_could_put_together_is_nothing(piece: Any) -> None:
    assert joined([{"tool_calls": [{"index": 0}]}, piece]) is None
