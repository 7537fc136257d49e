"""By what two attempts at one request are known as such.

A client that sends a request again may say so: SDKs count their retries, others give both attempts one key. What has
another body is another request, whatever its key says. Only digests are kept of either.

A count says less than a key: of several requests with equal bodies (a best of n), any may be the one that is sent
again, and so may one that never became a call. `Missed` knows where that can be.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.ledger.episode import Episode

MOST_DIGITS = 9
"""No more of a count of retries are read."""
MOST_MISSED = 100_000
"""So many refused requests are remembered; some 20 MB."""


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


class Missed:
    """Requests that came to nothing the ledger knows of: by name those that came and were not let in, and, before the
    time `since`, any that there may have been. A retry may be of one of them."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._since: dict[str, float] = {}
        """For single tenants."""
        self._outside: Counter[tuple[str, str]] = Counter()

    def came(self, name: tuple[str, str], retries: int, at: float) -> None:
        """The request `name` came at `at`. A retry is of a request that came before, or was missed then."""
        if not retries:
            self._outside[name] += 1
        if len(self._outside) > MOST_MISSED:
            self.anything(at)

    def let_in(self, name: tuple[str, str]) -> None:
        """A request `name` that came is known now, or its retry."""
        if self._outside[name] <= 1:
            del self._outside[name]
        else:
            self._outside[name] -= 1

    def anything(self, at: float, tenant: str | None = None) -> None:
        """Until `at` there may have been requests that nobody has read, of `tenant` or of any."""
        if tenant is not None:
            self._since[tenant] = at
        else:
            self.since = at
            self._outside.clear()
            self._since.clear()

    def explains(self, name: tuple[str, str], retries: int, episode: Episode | None) -> bool:
        """Whether this may be a retry of a request that was missed, in `episode` if that is known."""
        if not retries or name in self._outside or episode is None:
            return retries > 0 and name in self._outside
        return episode.opened_at <= max(self.since, self._since.get(episode.tenant, self.since))
