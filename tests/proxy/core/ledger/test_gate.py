"""The gate: every state under every command."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger.gate import Gate, check_version
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import MAX_VERSION
from ajet_sdk.sample import spans_of

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


@pytest.mark.parametrize("version", [0, 1, MAX_VERSION])
def test_versions_are_what_a_batch_can_say(version: int) -> None:
    check_version(version, "version")
    assert spans_of([[version, 1]], 1) == ((version, 1),)
    with pytest.raises(BadRequest):
        spans_of([[version + MAX_VERSION + 1, 1]], 1)


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 1_700_000_000_000])
def test_what_no_batch_could_say_is_no_version(version: int) -> None:
    with pytest.raises(BadRequest) as caught:
        check_version(version, "version")
    assert caught.value.param == "version"
