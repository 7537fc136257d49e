"""Which retries may be of a request that nobody knows."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.retries import UnseenRequests
from tests.kit.ledger_rig import blank


def opened(at: float) -> Episode:
    """An episode that opened then."""
    return blank(at=at)


ONE, OTHER = ("ep", "one"), ("ep", "other")


def test_a_retry_may_be_of_a_request_that_was_not_let_in() -> None:
    unseen = UnseenRequests(since=10.0)
    for _ in range(2):
        unseen.refused(ONE, 20.0)
    assert unseen.explains(ONE, opened(20.0)) and unseen.explains(ONE, None)
    assert not unseen.explains(OTHER, opened(20.0))
    unseen.let_in(ONE)  # a retry of one of the two
    assert unseen.explains(ONE, opened(20.0))
    for _ in range(2):
        unseen.let_in(ONE)
        assert not unseen.explains(ONE, opened(20.0))


def test_before_the_proxy_ran_or_read_what_came_any_request_may_have_been_missed() -> None:
    unseen = UnseenRequests(since=10.0)
    assert unseen.explains(ONE, opened(10.0)) and not unseen.explains(ONE, opened(10.5))
    unseen.unread(11.0)
    assert unseen.explains(ONE, opened(10.5)) and not unseen.explains(ONE, opened(11.5))
    assert not unseen.explains(ONE, None)


def test_what_nobody_read_was_one_tenant_s() -> None:
    unseen = UnseenRequests(since=10.0)
    unseen.unread(11.0, tenant="other")
    assert not unseen.explains(ONE, opened(10.5))
    unseen.unread(11.0, tenant="")
    assert unseen.explains(ONE, opened(10.5)) and not unseen.explains(ONE, opened(11.5))
    unseen.unread(12.0)
    assert unseen.explains(ONE, opened(11.5)) and not unseen.explains(ONE, opened(12.5))


def test_with_too_many_to_remember_any_may_have_been_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.retries.MOST_NOTED", 2)
    unseen = UnseenRequests(since=10.0)
    for number in range(3):
        unseen.refused(("ep", str(number)), 20.0 + number)
    assert unseen.since == 22.0 and unseen.explains(OTHER, opened(22.0))
    assert not unseen.explains(ONE, opened(23.0))
