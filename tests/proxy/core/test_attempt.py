"""What two attempts at one request have in common."""

from __future__ import annotations

import pytest

from ajet_proxy.core.attempt import attempt, is_retry, retry_key

COUNT, KEY = "X-Stainless-Retry-Count", "Idempotency-Key"


@pytest.mark.parametrize(
    ("count", "again"),
    [(None, False), ("", False), ("0", False), ("00", False), ("1", True), ("10", True), ("-1", False), ("x", False),
     ("\u0661", False)],
)  # fmt: skip
def test_a_client_says_that_it_tries_again(count: str | None, again: bool) -> None:
    headers = {} if count is None else {COUNT: count}
    assert is_retry(headers) is again
    assert attempt(headers, "/p", b"{}", scope=b"")["is_retry"] is again


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
        "body_hash": one()[0], "idempotency_key": None, "is_retry": False
    }  # fmt: skip
