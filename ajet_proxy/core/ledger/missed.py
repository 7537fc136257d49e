"""Requests that the ledger knows nothing of, and that their clients may send again.

A retry that only counts itself may be of one of them. Then it takes no answered call out.
"""

from __future__ import annotations

from collections import Counter

from ajet_proxy.core.ledger.episode import Episode

MOST_MISSED = 100_000
"""So many refused requests are remembered; some 20 MB."""


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
