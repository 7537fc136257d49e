"""What two attempts at one request have in common."""

from __future__ import annotations

import pytest

from ajet_proxy.core.identity.retries import attempt, retries, retry_key

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
