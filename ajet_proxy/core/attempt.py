"""By what two attempts at one request are known as such.

A client that sends a request again may say so: SDKs count their retries, others give both attempts one key. What has
another body is another request, whatever its key says. Only digests are kept of either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def attempt(headers: Mapping[str, str], path: str, body: bytes, *, scope: bytes) -> dict[str, Any]:
    """What a request has in common with its other attempts, and whether it says of itself that it is not the first.
    `scope` keeps clients apart that do not name their episodes. Names in `headers` are found however they are written.
    """
    key = retry_key(headers)
    return {
        "body_hash": hashlib.sha256(scope + path.encode() + b"\n" + body).hexdigest(),
        "idempotency_key": key and hashlib.sha256(scope + key.encode() + body).hexdigest(),
        "is_retry": is_retry(headers),
    }


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it sends this for a second time."""
    count = headers.get("X-Stainless-Retry-Count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


def retry_key(headers: Mapping[str, str]) -> str | None:
    """What two attempts at one request have in common, as 64 hexadecimal digits; None where an agent says nothing."""
    key = headers.get("Idempotency-Key")
    return None if not key else hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
