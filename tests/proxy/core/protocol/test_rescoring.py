"""Scoring: the exact ids go out, and only one logprob for each of them comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.rescoring import answered, question
from ajet_proxy.core.trajectory.call import Captured, Lost, Unscored

CHOICE = Unscored(0, "tiny", (1, 2, 3), (7, 8, 9), "tool_calls")


def answer(rows: Any, *last: Any, token: int = 9) -> bytes:
    tops = [{"token_id:4": -0.125, f"token_id:{token}": value} for value in last]
    return json.dumps({"choices": [{"prompt_logprobs": rows, "logprobs": {"top_logprobs": tops}}]}).encode()


def row(token: int, logprob: Any) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": 1, "decoded_token": "t"}}


ROWS: list[Any] = [None, row(2, -9.0), row(3, -9.0), row(7, -0.5), row(8, -1)]


def test_the_question_leaves_room_for_the_one_token_that_must_be_generated() -> None:
    body = question(CHOICE, model="adapter", salt=None)
    assert (body["model"], body["prompt"], body["logprob_token_ids"]) == ("adapter", [1, 2, 3, 7, 8], [9])
    assert (body["max_tokens"], body["prompt_logprobs"], body["logprobs"]) == (1, 0, 0)
    assert "cache_salt" not in body
    assert question(CHOICE, model="adapter", salt="s")["cache_salt"] == "s"


def test_the_answer_makes_the_choice_whole() -> None:
    assert answered(CHOICE, answer(ROWS, -0.25)) == Captured(
        0, "tiny", (1, 2, 3), (7, 8, 9), (-0.5, -1.0, -0.25), "tool_calls", scored=True
    )
    single = Unscored(2, "tiny", (1,), (7,), "stop")
    expected = Captured(2, "tiny", (1,), (7,), (-2.0,), "stop", scored=True)
    assert answered(single, answer([None], -2, token=7)) == expected


@pytest.mark.parametrize("body", [
    b"", b"\xff", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[null]}', b'{"error":{}}', b"[" * 200_000,
    answer(None, -1.0), answer(ROWS), answer(ROWS, None), answer(ROWS, -1.0, token=8), answer(ROWS[:-1], -1.0),
    answer([*ROWS, row(9, -1.0)], -1.0), answer([*ROWS[:-1], None], -1.0), answer([*ROWS[:-1], row(9, -1.0)], -1.0),
    answer([*ROWS[:-1], row(8, None)], -1.0), answer([*ROWS[:-1], row(8, "-1")], -1.0),
    answer([*ROWS[:-1], row(8, float("nan"))], -1.0), answer([*ROWS[:-1], row(8, float("-inf"))], -1.0),
    answer([*ROWS[:-1], row(8, 0.5)], -1.0), answer(ROWS, 0.5), answer(ROWS, 1e300), answer(ROWS, True),
    answer([*ROWS[:-1], row(8, -(10**400))], -1.0), b'{"choices":[{"prompt_logprobs":[0,0,0,0,0]}]}',
], ids=range(26))  # fmt: skip
def test_anything_else_is_a_lost_call(body: bytes) -> None:
    assert answered(CHOICE, body) == Lost(0, "not_scored")
