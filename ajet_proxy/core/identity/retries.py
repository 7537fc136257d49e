"""By what two attempts at one request are known as such.

A client that sends a request again may say so: SDKs count their retries, others give both attempts one key. What has
another body is another request, whatever its key says. Only digests are kept of either.

A count says less than a key: of several requests with equal bodies (a best of n), any may be the one that is sent
again, and so may one that never became a call (`ajet_proxy.core.ledger.retries`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

MOST_DIGITS = 9
"""No more of a count of retries are read."""


def attempt(headers: Mapping[str, str], path: str, body: bytes, *, scope: bytes) -> dict[str, Any]:
    """What a request has in common with its other attempts, and how many of these it says there were. `scope` keeps
    clients apart that do not name their episodes. Names in `headers` are found however they are written.
    """
    key = retry_key(headers)
    return {
        "body_hash": hashlib.sha256(scope + path.encode() + b"\n" + body).hexdigest(),
        "idempotency_key": key and hashlib.sha256(scope + key.encode() + body).hexdigest(),
        "retries": retries(headers),
    }


def retries(headers: Mapping[str, str]) -> int:
    """How often the client says that it has sent this before; 0 where it does not say."""
    count = headers.get("X-Stainless-Retry-Count", "")
    if not (count.isascii() and count.isdigit()):
        return 0
    return int(count.lstrip("0")[:MOST_DIGITS] or "0")


def retry_key(headers: Mapping[str, str]) -> str | None:
    """What two attempts at one request have in common, as 64 hexadecimal digits; None where an agent says nothing."""
    key = headers.get("Idempotency-Key")
    return None if not key else hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
