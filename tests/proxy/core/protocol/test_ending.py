"""Tells whether an answer with a tool call was cut: by its request's limit, and by what an engine says of its last
token."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.ending import answered, is_full, names_stop, question, stop_ids
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured
from tests.proxy.core.protocol.answers import CHAT, COMPLETIONS, dump

CHOICE = Captured(0, "m", (1, 2), (5, 6, 7), (-0.5, -0.5, -0.5), "tool_calls")


@pytest.mark.parametrize(("route", "asked", "full"), [
    (CHAT, {}, False), (CHAT, {"max_tokens": 3}, True), (CHAT, {"max_tokens": 4}, False),
    (CHAT, {"max_tokens": "3"}, True), (CHAT, {"max_tokens": 3, "max_completion_tokens": 9}, False),
    (CHAT, {"max_tokens": 9, "max_completion_tokens": 3}, True), (CHAT, {"max_output_tokens": 3}, False),
    (COMPLETIONS, {"max_tokens": 3}, True), ("/v1/responses", {"max_output_tokens": 3}, True),
    ("/v1/responses", {"max_tokens": 3}, False),
])  # fmt: skip
def test_an_answer_is_full_that_has_what_its_request_allows(route: str, asked: dict[str, Any], full: bool) -> None:
    assert is_full(CHOICE, CAPTURED[route].limits, asked) == full


@pytest.mark.parametrize(("stop", "asked", "named"), [
    (None, {}, False), ("END", {}, True), (None, {"stop_token_ids": [7]}, True), (None, {"stop_token_ids": [6]}, False),
    (None, {"stop_token_ids": 7}, False), (None, {"stop_token_ids": [{}, "7"]}, True),
])  # fmt: skip
def test_a_request_may_name_what_stops(stop: str | None, asked: dict[str, Any], named: bool) -> None:
    choice = Captured(0, "m", (1, 2), (5, 6, 7), (-0.5, -0.5, -0.5), "tool_calls", stop_string=stop)
    assert names_stop(choice, stop_ids(asked)) == named


def test_an_engine_is_asked_for_the_very_token() -> None:
    path, asked = question("m", 7)
    assert (path, asked["logit_bias"], asked["max_tokens"]) == (COMPLETIONS, {"7": 100.0}, 1)


@pytest.mark.parametrize(("token_ids", "finish", "stops"), [
    ([7], "stop", True), ([7], "length", False), ([6], "stop", None), ([7], None, None), ([7], [], None),
    (7, "stop", None),
])  # fmt: skip
def test_what_it_answers(token_ids: Any, finish: Any, stops: bool | None) -> None:
    assert answered(7, dump({"choices": [{"token_ids": token_ids, "finish_reason": finish}]}).encode()) is stops


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]}', b'{"choices":[{},{}]}'])
def test_what_is_no_answer_tells_nothing(body: bytes) -> None:
    assert answered(7, body) is None
