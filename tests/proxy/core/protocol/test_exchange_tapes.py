"""The capture core against what a real vLLM wrote: every recorded exchange, whole, byte by byte and split at random.

The engine's answer to the proxy's question goes in; what comes out must be the engine's own answer to the agent's
question, and the calls must hold exactly the ids and logprobs on the tape.
"""

from __future__ import annotations

import json
import random

import pytest

from ajet_proxy.core.trajectory.call import Captured
from tests.kit import compare, tapes
from tests.kit.record_tapes import PASSED
from tests.kit.tapes import AGENT, PROXY, Tape
from tests.proxy.core.replaying import exchange_of, pieces, replay

NAMES = tapes.names()
PASSED_THROUGH = [name for name in NAMES if name in PASSED]
CAPTURABLE = [name for name in NAMES if name not in PASSED_THROUGH]


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


@pytest.mark.parametrize("name", CAPTURABLE)
def test_the_engine_is_asked_what_stands_on_the_tape(name: str) -> None:
    """Fails when the proxy asks otherwise than when the tapes were recorded: record them anew."""
    assert json.loads(exchange_of(tapes.load()[name, AGENT]).upstream_body()) == tapes.load()[name, PROXY].request


@pytest.mark.parametrize("name", CAPTURABLE)
def test_the_agent_sees_what_it_would_have_seen(name: str) -> None:
    direct, tape = tapes.load()[name, AGENT], tapes.load()[name, PROXY]
    _, seen, _ = replay(direct, tape, [chunk.encode() for chunk in tape.chunks])
    compare.same_answer(seen, direct.body)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_any_split_gives_the_same_bytes_and_calls(name: str) -> None:
    tape = tapes.load()[name, PROXY]
    _, whole, outcomes = replay(tapes.load()[name, AGENT], tape, [tape.body])
    dice = random.Random(name)
    splits = [[tape.body[i : i + 1] for i in range(len(tape.body))], *(pieces(tape.body, dice) for _ in range(5))]
    for split in splits:
        early, seen, again = replay(tapes.load()[name, AGENT], tape, split)
        assert seen == whole
        assert again == outcomes
        if tape.status == 200:
            assert not early.endswith(b"data: [DONE]\n\n"), "an answer may be complete only once its calls are durable"


@pytest.mark.parametrize("name", [name for name in CAPTURABLE if tapes.load()[name, AGENT].status == 200])
def test_the_calls_are_the_engines_own(name: str) -> None:
    tape = tapes.load()[name, PROXY]
    _, _, outcomes = replay(tapes.load()[name, AGENT], tape, [chunk.encode() for chunk in tape.chunks])
    captured = {}
    for outcome in outcomes:
        assert isinstance(outcome, Captured), outcome
        ids = (list(outcome.prompt_token_ids), list(outcome.token_ids), list(outcome.logprobs), outcome.finish_reason)
        captured[outcome.index] = ids
    assert captured == expected_calls(tape)
    assert captured


@pytest.mark.parametrize("name", [name for name in PASSED_THROUGH if tapes.load()[name, AGENT].status == 200])
def test_what_cannot_be_captured_passes_as_it_is(name: str) -> None:
    direct = tapes.load()[name, AGENT]
    exchange = exchange_of(tapes.load()[name, AGENT])
    assert json.loads(exchange.upstream_body()) == direct.request
    _, seen, outcomes = replay(tapes.load()[name, AGENT], direct, [direct.body])
    assert seen == direct.body
    assert not any(isinstance(outcome, Captured) for outcome in outcomes)


def test_tapes_of_both_askers_exist_for_every_request() -> None:
    assert len(NAMES) > 110
    assert {asked_by for _, asked_by in tapes.load()} == {AGENT, PROXY}
    assert len(tapes.load()) == 2 * len(NAMES)
