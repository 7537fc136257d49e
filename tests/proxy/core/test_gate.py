"""The gate: every state under every command."""

from __future__ import annotations

import pytest

from ajet_proxy.core.gate import Gate

OPEN, SHUT = Gate(since=5.0), Gate(True, 5.0, "weights")


@pytest.mark.parametrize(
    ("gate", "in_flight", "state"),
    [(OPEN, 0, "open"), (OPEN, 3, "open"), (SHUT, 3, "closing"), (SHUT, 1, "closing"), (SHUT, 0, "closed")],
)
def test_its_state(gate: Gate, in_flight: int, state: str) -> None:
    assert gate.state(in_flight) == state


def test_closing_and_opening() -> None:
    assert OPEN.close(9.0, "why") == Gate(True, 9.0, "why")
    assert SHUT.close(9.0, "why") is SHUT
    assert SHUT.open(9.0) == Gate(False, 9.0)
    assert OPEN.open(9.0) is OPEN
    assert not Gate().shut
