"""The capture core against what a real vLLM wrote on ``/v1/responses``: see `test_exchange_tapes`."""

from __future__ import annotations

import json
import random

import pytest

from ajet_proxy.core.call import Captured, Outcome, Unscored
from ajet_proxy.core.dialects import CAPTURED
from ajet_proxy.core.dialects.request import Request
from ajet_proxy.core.exchange import Exchange
from tests.kit import compare_responses, tapes
from tests.kit.record_responses import FILE, PASSED_THROUGH, as_proxy
from tests.kit.tapes import AGENT, PROXY, Tape

TAPES = tapes.load(FILE)
NAMES = sorted({name for name, _ in TAPES})
ANSWERED = [
    name for name in NAMES if TAPES[name, AGENT].status == 200 and name.removesuffix("-stream") not in PASSED_THROUGH
]
WITHOUT_TEXT = (
    "tool-alone", "tools2", "tool-required", "tool-named", "tool-asked", "namespace", "reasoning-tool",
    "reasoning-alone", "reasoning-low", "reasoning-before",
)  # fmt: skip


def exchange_for(name: str) -> Exchange:
    tape = TAPES[name, AGENT]
    return Exchange(CAPTURED[tape.route], Request(json.dumps(tape.request).encode()))


def replay(name: str, parts: list[bytes], tape: Tape) -> tuple[bytes, bytes, tuple[Outcome, ...]]:
    """``(what the client gets before the call is settled, everything it gets, the outcomes)``."""
    exchange = exchange_for(name)
    exchange.on_headers(tape.status, tape.headers["content-type"])
    early, late = b"", b""
    for part in parts:
        was_settled = exchange.settled
        out = b"".join(exchange.feed(part))
        early, late = (early, late + out) if was_settled else (early + out, late)
        if exchange.settled:
            late += b"".join(exchange.release())
    return early, early + late + b"".join(exchange.finish()), exchange.outcomes


def pieces(body: bytes, dice: random.Random) -> list[bytes]:
    out = []
    while body:
        size = dice.choice((1, 2, 3, 5, 17, 100, 1000))
        out.append(body[:size])
        body = body[size:]
    return out


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_asked_what_stands_on_the_tape(name: str) -> None:
    """Fails when the proxy asks otherwise than when the tapes were recorded: record them anew."""
    asked = json.loads(exchange_for(name).upstream_body)
    assert asked == TAPES[name, PROXY].request == as_proxy(name, TAPES[name, AGENT].request)


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_sees_what_it_would_have_seen(name: str) -> None:
    direct, tape = TAPES[name, AGENT], TAPES[name, PROXY]
    _, seen, _ = replay(name, [chunk.encode() for chunk in tape.chunks], tape)
    assert tape.status == direct.status
    compare_responses.same_answer(seen, direct.body)


@pytest.mark.parametrize("name", NAMES)
def test_any_split_gives_the_same_bytes_and_call(name: str) -> None:
    tape = TAPES[name, PROXY]
    _, whole, outcomes = replay(name, [tape.body], tape)
    dice = random.Random(name)
    splits = [[tape.body[at : at + 1] for at in range(len(tape.body))], *(pieces(tape.body, dice) for _ in range(5))]
    for split in splits:
        early, seen, again = replay(name, split, tape)
        assert seen == whole
        assert again == outcomes
        assert b"response.completed" not in early or tape.status != 200, "the end may leave only once the call is safe"


@pytest.mark.parametrize("name", ANSWERED)
def test_the_call_is_the_engines_own(name: str) -> None:
    tape, case = TAPES[name, PROXY], name.removesuffix("-stream")
    _, _, (outcome,) = replay(name, [chunk.encode() for chunk in tape.chunks], tape)
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
