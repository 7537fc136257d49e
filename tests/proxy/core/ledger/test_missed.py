"""Which retries may be of a request that nobody knows."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.missed import Missed


def opened(at: float) -> Episode:
    """An episode that opened then."""
    return Episode("e", None, None, None, False, at, 1.0, 1.0, "", "path", {}, None)


ONE, OTHER = ("ep", "one"), ("ep", "other")


def test_a_retry_may_be_of_a_request_that_was_not_let_in() -> None:
    missed = Missed(since=10.0)
    for _ in range(2):
        missed.came(ONE, 0, 20.0)
    missed.came(ONE, 1, 20.0)  # of one of them, and not let in either
    missed.let_in(ONE)  # the first of the two
    assert missed.explains(ONE, 1, opened(20.0)) and missed.explains(ONE, 2, None)
    assert not missed.explains(ONE, 0, opened(20.0)), "no retry"
    assert not missed.explains(OTHER, 1, opened(20.0))
    missed.let_in(ONE)  # a retry of the second
    assert not missed.explains(ONE, 1, opened(20.0))
    missed.let_in(ONE)
    assert not missed.explains(ONE, 1, opened(20.0))


def test_before_the_proxy_ran_or_read_what_came_any_request_may_have_been_missed() -> None:
    missed = Missed(since=10.0)
    assert missed.explains(ONE, 1, opened(10.0)) and not missed.explains(ONE, 1, opened(10.5))
    assert not missed.explains(ONE, 0, opened(5.0))
    missed.anything(11.0)
    assert missed.explains(ONE, 1, opened(10.5)) and not missed.explains(ONE, 1, opened(11.5))
    assert not missed.explains(ONE, 1, None)


def test_what_nobody_read_was_one_tenant_s() -> None:
    missed = Missed(since=10.0)
    missed.anything(11.0, tenant="other")
    assert not missed.explains(ONE, 1, opened(10.5))
    missed.anything(11.0, tenant="")
    assert missed.explains(ONE, 1, opened(10.5)) and not missed.explains(ONE, 1, opened(11.5))
    missed.anything(12.0)
    assert missed.explains(ONE, 1, opened(11.5)) and not missed.explains(ONE, 1, opened(12.5))


def test_with_too_many_to_remember_any_may_have_been_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.missed.MOST_MISSED", 2)
    missed = Missed(since=10.0)
    for number in range(3):
        missed.came(("ep", str(number)), 0, 20.0 + number)
    assert missed.since == 22.0 and missed.explains(OTHER, 1, opened(22.0))
    assert not missed.explains(ONE, 1, opened(23.0))
