"""What two attempts at one request have in common."""

from __future__ import annotations

import pytest

from ajet_proxy.core.identity.retries import Missed, attempt, retries, retry_key
from ajet_proxy.core.ledger.episode import Episode

COUNT, KEY = "X-Stainless-Retry-Count", "Idempotency-Key"


@pytest.mark.parametrize(
    ("count", "often"),
    [(None, 0), ("", 0), ("0", 0), ("00", 0), ("1", 1), ("10", 10), ("-1", 0), ("x", 0), ("\u0661", 0),
     ("0002", 2), ("9" * 5000, 999_999_999)],
)  # fmt: skip
def test_a_client_says_how_often_it_tried(count: str | None, often: int) -> None:
    headers = {} if count is None else {COUNT: count}
    assert retries(headers) == often
    assert attempt(headers, "/p", b"{}", scope=b"")["retries"] == often


def test_a_key_is_kept_as_a_digest_whatever_bytes_it_has() -> None:
    keys = [retry_key({KEY: key}) for key in ("a", "b", "\udcff")]
    assert len(set(keys)) == 3 and all(key is not None and len(key) == 64 for key in keys)
    assert retry_key({}) is None and retry_key({KEY: ""}) is None


def test_attempts_of_two_clients_or_at_two_requests_have_nothing_in_common() -> None:
    def one(path: str = "/p", body: bytes = b"{}", scope: bytes = b"s", key: str = "k") -> tuple[str, str]:
        found = attempt({KEY: key}, path, body, scope=scope)
        return found["body_hash"], found["idempotency_key"]

    assert one() == one()
    others = [one(path="/q"), one(body=b"[]"), one(scope=b"t")]
    assert len({one()[0], *(body for body, _ in others)}) == 4
    assert one()[1] not in (one(key="l")[1], one(body=b"[]")[1], one(scope=b"t")[1])
    assert attempt({}, "/p", b"{}", scope=b"s") == {
        "body_hash": one()[0], "idempotency_key": None, "retries": 0
    }  # fmt: skip


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
    monkeypatch.setattr("ajet_proxy.core.identity.retries.MOST_MISSED", 2)
    missed = Missed(since=10.0)
    for number in range(3):
        missed.came(("ep", str(number)), 0, 20.0 + number)
    assert missed.since == 22.0 and missed.explains(OTHER, 1, opened(22.0))
    assert not missed.explains(ONE, 1, opened(23.0))
