"""The capture core against what a real vLLM wrote: every recorded exchange, whole, byte by byte and split at random.

The engine's answer to the proxy's question goes in; what comes out must be the engine's own answer to the agent's
question, and the calls must hold exactly the ids and logprobs on the tape.
"""

from __future__ import annotations

import json
import random

import pytest

from ajet_proxy.core.trajectory.call import Captured, Unscored
from tests.fuzz.mutations import pieces
from tests.kit import compare, compare_events
from tests.kit.record_responses import PASSED_THROUGH
from tests.kit.record_tapes import PASSED
from tests.kit.tapes import Tape
from tests.proxy.core.replaying import RECORDED, exchange_of, replay

RESPONSES = "responses-"
PASSED_BY = (*PASSED, *(f"{RESPONSES}{name}{stream}" for name in PASSED_THROUGH for stream in ("", "-stream")))
NAMES = [name for name in RECORDED if name not in PASSED]
GOOD = [name for name, (direct, _) in RECORDED.items() if direct.status == 200]
ANSWERED = [name for name in GOOD if name not in PASSED_BY]
WITHOUT_TEXT = (
    "tool-alone", "tools2", "tool-required", "tool-named", "tool-asked", "namespace", "reasoning-tool",
    "reasoning-alone", "reasoning-low", "reasoning-before",
)  # fmt: skip


def expected_calls(tape: Tape) -> dict[int, tuple[list[int], list[int], list[float], str]]:
    """``index → (prompt ids, ids, logprobs, finish reason)`` as the tape has them, read without any of our code."""
    calls: dict[int, tuple[list[int], list[int], list[float], str]] = {}
    bodies = compare.events(tape.body) if tape.stream else iter([json.loads(tape.body)])
    for body in bodies:
        for choice in [] if body == "[DONE]" else body["choices"]:
            prompt, ids, logprobs, finish = calls.get(choice["index"], ([], [], [], ""))
            prompt = prompt or body.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
            sampled = choice.get("token_ids") or []
            rows = compare.rows(choice["logprobs"])
            ids, logprobs = ids + sampled, logprobs + rows[len(rows) - len(sampled) :]
            calls[choice["index"]] = (prompt, ids, logprobs, choice["finish_reason"] or finish)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_asked_what_stands_on_the_tape(name: str) -> None:
    """Fails when the proxy asks otherwise than when the tapes were recorded: record them anew."""
    direct, tape = RECORDED[name]
    assert json.loads(exchange_of(direct).upstream_body()) == tape.request


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_sees_what_it_would_have_seen(name: str) -> None:
    direct, tape = RECORDED[name]
    _, seen, _ = replay(direct, tape, [chunk.encode() for chunk in tape.chunks])
    assert tape.status == direct.status
    (compare_events if name.startswith(RESPONSES) else compare).same_answer(seen, direct.body)


@pytest.mark.parametrize("name", NAMES)
def test_any_split_gives_the_same_bytes_and_calls(name: str) -> None:
    direct, tape = RECORDED[name]
    _, whole, outcomes = replay(direct, tape, [tape.body])
    dice = random.Random(name)
    for split in [[tape.body[i : i + 1] for i in range(len(tape.body))], *(pieces(tape.body, dice) for _ in range(5))]:
        early, seen, again = replay(direct, tape, split)
        assert (seen, again) == (whole, outcomes)
        if tape.status == 200:
            ended = early.endswith(b"data: [DONE]\n\n") or b"response.completed" in early
            assert not ended, "an answer may be complete only once its calls are durable"


@pytest.mark.parametrize("name", [name for name in ANSWERED if not name.startswith(RESPONSES)])
def test_the_calls_are_the_engines_own(name: str) -> None:
    direct, tape = RECORDED[name]
    _, _, outcomes = replay(direct, tape, [chunk.encode() for chunk in tape.chunks])
    captured = {}
    for outcome in outcomes:
        assert isinstance(outcome, Captured), outcome
        ids = (list(outcome.prompt_token_ids), list(outcome.token_ids), list(outcome.logprobs), outcome.finish_reason)
        captured[outcome.index] = ids
    assert captured == expected_calls(tape)
    assert captured


@pytest.mark.parametrize("name", [name for name in ANSWERED if name.startswith(RESPONSES)])
def test_the_call_of_a_response_is_the_engines_own(name: str) -> None:
    (direct, tape), case = RECORDED[name], name.removeprefix(RESPONSES).removesuffix("-stream")
    _, _, (outcome,) = replay(direct, tape, [chunk.encode() for chunk in tape.chunks])
    told = compare_events.final(tape.body)
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


@pytest.mark.parametrize("name", [name for name in GOOD if name in PASSED])
def test_what_cannot_be_captured_passes_as_it_is(name: str) -> None:
    direct, _ = RECORDED[name]
    assert json.loads(exchange_of(direct).upstream_body()) == direct.request
    _, seen, outcomes = replay(direct, direct, [direct.body])
    assert seen == direct.body
    assert not any(isinstance(outcome, Captured) for outcome in outcomes)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_answer_that_is_not_captured_has_not_failed(name: str) -> None:
    """The engine was asked as the client asked, and reports what it reports then."""
    direct, _ = RECORDED[name]
    running = exchange_of(direct)
    running.retreat()
    running.on_headers(200, direct.headers["content-type"])
    for piece in pieces(direct.body, random.Random(name)) if running.skip is not None else ():
        running.feed(piece)
    running.finish()
    assert running.failed is None


def test_there_are_tapes_of_all_kinds() -> None:
    responses = [name for name in RECORDED if name.startswith(RESPONSES)]
    assert len(RECORDED) - len(responses) > 110 and len(responses) >= 50
    assert set(PASSED_BY) & set(responses) and set(PASSED) < set(RECORDED)
