"""One choice: what makes it a call, and the reason for each that is none."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.choice import Tally
from ajet_proxy.core.trajectory.call import Captured, Lost

SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]


def tally(**other: Any) -> Tally:
    return Tally(**{"ids": [5, 6], "logprobs": [-0.5, -1], "finish_reason": "stop", "told": True, **other})


def test_a_choice_that_is_told_exactly_is_a_call() -> None:
    assert tally(stop_reason="END", versions=SPANS).outcome(3, "m", (1, 2)) == Captured(
        3, "m", (1, 2), (5, 6), (-0.5, -1.0), "stop", stop_string="END", labels=(("3", 1), ("4", 1))
    )
    assert tally(ids=[], logprobs=[]).outcome(0, "m", (1,)) == Captured(0, "m", (1,), (), (), "stop")
    assert tally(stop_reason=7).outcome(0, "m", ()) == Captured(0, "m", (), (5, 6), (-0.5, -1.0), "stop")


@pytest.mark.parametrize(("other", "prompt", "reason"), [
    ({"finish_reason": None}, (1,), "capture_failed"), ({"finish_reason": ["stop"]}, (1,), "capture_failed"),
    ({"finish_reason": "abort"}, (1,), "engine_aborted"), ({"finish_reason": "error"}, (1,), "engine_error"),
    ({"finish_reason": "error", "silent": True}, None, "engine_error"),
    ({"silent": True}, (1,), "no_token_ids"), ({"told": False}, (1,), "no_token_ids"), ({}, None, "no_token_ids"),
    ({}, [1, "x"], "capture_failed"), ({}, "absent", "capture_failed"), ({"ids": [5, -6]}, (1,), "capture_failed"),
    ({"logprobs": [-0.5]}, (1,), "no_logprobs"), ({"logprobs": [-0.5, None]}, (1,), "no_logprobs"),
    ({"logprobs": [-0.5, 0.5]}, (1,), "no_logprobs"), ({"logprobs": [-1e300, -0.5]}, (1,), "no_logprobs"),
])  # fmt: skip
def test_any_other_choice_is_lost_with_a_reason(other: dict[str, Any], prompt: Any, reason: str) -> None:
    assert tally(**other).outcome(1, "m", prompt) == Lost(1, reason)


@pytest.mark.parametrize("spans", [None, [], 7, ["3"], SPANS[:1], [*SPANS, SPANS[0]], [{"version": 3, **SPANS[0]}, 1]])
def test_weights_that_are_not_told_token_by_token_are_not_told(spans: Any) -> None:
    outcome = tally(versions=spans).outcome(0, "m", (1,))
    assert isinstance(outcome, Captured) and outcome.labels == ()
