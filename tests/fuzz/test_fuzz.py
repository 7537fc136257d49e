"""A short slice of the fuzz with a fixed seed; its reference against the engine's own answers; that it finds faults."""

from __future__ import annotations

import pytest

from ajet_proxy.core.protocol import reading
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.sse import SseParser
from tests.fuzz import __main__ as fuzz
from tests.fuzz import core_cases, engine
from tests.fuzz.reference import events
from tests.kit import compare, tapes
from tests.kit.tapes import AGENT


def test_a_slice_of_the_fuzz() -> None:
    tally = fuzz.run(seed=1, count=1500, sockets=200)
    assert tally.failed == []
    counts = tally.counts
    assert min(counts[kind] for kind in ("request", "answer", "anthropic", "captured", "lost", "status 400")) > 60
    assert counts["loose"] < 30, "the reference must foretell nearly all"


@pytest.mark.parametrize("place", range(len(core_cases.pool())), ids=lambda place: core_cases.pool()[place][0])
def test_the_reference_makes_the_engines_own_answer_of_what_the_proxy_is_sent(place: int) -> None:
    name, path, body, answer = core_cases.pool()[place]
    reference = core_cases.reference_of(path, body)
    if answer.content_type.startswith("text/event-stream"):
        seen = b"".join(map(reference.event, answer.parts))
    else:
        seen = answer.body if answer.status >= 400 else reference.document(answer.body)
    if not name.startswith("stub-"):
        compare.same_answer(seen, tapes.load()[name, AGENT].body)
        return
    direct = engine.ask(path, body)
    assert answer.status == direct.status
    assert sorted(events(seen)) == sorted(direct.parts)  # which of several choices speaks first is the engine's whim


def keeps_ids(*_: object) -> None:
    """A reading that puts nothing back."""


def forgets_a_byte(self: SseParser) -> bytes:
    rest, self.unfinished, self._searched = self.unfinished, bytearray(), 0
    return bytes(rest[:-1])


def raises(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("owner", "name", "broken"), [
    (reading, "hide", keeps_ids), (SseParser, "take", forgets_a_byte), (Exchange, "finish", raises),
])  # fmt: skip
def test_a_fault_in_the_core_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: object, name: str, broken: object
) -> None:
    monkeypatch.setattr(owner, name, broken)
    tally = fuzz.run(seed=1, count=150, sockets=0)
    assert tally.failed
    assert f"make fuzz CASE={tally.failed[0]}" in capsys.readouterr().out


def test_a_core_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)
    monkeypatch.setattr(Exchange, "on_headers", spin)
    tally = fuzz.Tally()
    fuzz.play("1/1", tally)
    assert tally.failed == ["1/1"]
