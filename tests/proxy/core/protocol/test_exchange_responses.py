"""The capture core against what a real vLLM wrote on ``/v1/responses``: see `test_exchange_tapes`."""

from __future__ import annotations

import json
import random

import pytest

from ajet_proxy.core.trajectory.call import Captured, Unscored
from tests.kit import compare_responses, tapes
from tests.kit.record_responses import FILE, PASSED_THROUGH, as_proxy
from tests.kit.tapes import AGENT, PROXY
from tests.proxy.core.replaying import exchange_of, pieces, replay

TAPES = tapes.load(FILE)
NAMES = sorted({name for name, _ in TAPES})
ANSWERED = [
    name for name in NAMES if TAPES[name, AGENT].status == 200 and name.removesuffix("-stream") not in PASSED_THROUGH
]
WITHOUT_TEXT = (
    "tool-alone", "tools2", "tool-required", "tool-named", "tool-asked", "namespace", "reasoning-tool",
    "reasoning-alone", "reasoning-low", "reasoning-before",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_asked_what_stands_on_the_tape(name: str) -> None:
    """Fails when the proxy asks otherwise than when the tapes were recorded: record them anew."""
    asked = json.loads(exchange_of(TAPES[name, AGENT]).upstream_body())
    assert asked == TAPES[name, PROXY].request == as_proxy(name, TAPES[name, AGENT].request)


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_sees_what_it_would_have_seen(name: str) -> None:
    direct, tape = TAPES[name, AGENT], TAPES[name, PROXY]
    _, seen, _ = replay(direct, tape, [chunk.encode() for chunk in tape.chunks])
    assert tape.status == direct.status
    compare_responses.same_answer(seen, direct.body)


@pytest.mark.parametrize("name", NAMES)
def test_any_split_gives_the_same_bytes_and_call(name: str) -> None:
    tape = TAPES[name, PROXY]
    _, whole, outcomes = replay(TAPES[name, AGENT], tape, [tape.body])
    dice = random.Random(name)
    splits = [[tape.body[at : at + 1] for at in range(len(tape.body))], *(pieces(tape.body, dice) for _ in range(5))]
    for split in splits:
        early, seen, again = replay(TAPES[name, AGENT], tape, split)
        assert seen == whole
        assert again == outcomes
        assert b"response.completed" not in early or tape.status != 200, "the end may leave only once the call is safe"


@pytest.mark.parametrize("name", ANSWERED)
def test_the_call_is_the_engines_own(name: str) -> None:
    tape, case = TAPES[name, PROXY], name.removesuffix("-stream")
    _, _, (outcome,) = replay(TAPES[name, AGENT], tape, [chunk.encode() for chunk in tape.chunks])
    told = compare_responses.final(tape.body)
    texts = [item["content"][0]["logprobs"] for item in told["output"] if item["type"] == "message"]
    assert (texts == []) == (case in WITHOUT_TEXT)
    assert isinstance(outcome, Unscored if case in WITHOUT_TEXT else Captured)
    assert outcome.prompt_token_ids == tuple(told["input_messages"][0]["tokens"])
    assert outcome.token_ids == tuple(told["output_messages"][0]["tokens"])
    if isinstance(outcome, Captured):
        assert outcome.logprobs == tuple(row["logprob"] for row in texts[0])
    called = any(item["type"] == "function_call" for item in told["output"])
    cut = "length" if told["status"] == "incomplete" else "stop"
    assert outcome.finish_reason == ("tool_calls" if called and cut == "stop" else cut)


def test_tapes_of_both_askers_exist_for_every_request() -> None:
    assert len(NAMES) >= 50 and set(PASSED_THROUGH) < set(NAMES)
    assert len(TAPES) == 2 * len(NAMES)
    assert len(ANSWERED) > 30
