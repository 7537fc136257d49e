"""Words for what a run waits for, if that takes long.

Idea: what is waited for begins and ends, under a name. Once one of them has lasted for a while, a line says why; and
again every few minutes. What ends soon is never spoken of.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 15.0
AGAIN_S = 300.0


def warn(line: str) -> None:
    """Says a line where nobody else was named who does."""
    import logging

    logging.getLogger("ajet").warning(line)


class Patience:
    """Knows what is waited for, and since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str | None, float] = {}
        self._said = float("-inf")

    def waits(self, name: str | None, why: str | None, since: float) -> str | None:
        """`name` is being waited for, at least `since` then: the line that says so, once it is time for one. Without a
        `why` that needs no word."""
        if why is None:
            self.ends(name)
            return None
        now, began = self._clock(), self._since.setdefault(name, since)
        if now - began < LONG_S or now - self._said < AGAIN_S:
            return None
        self._said = now
        return f"waiting: {why}"

    def ends(self, *names: str | None) -> None:
        """These are waited for no more."""
        for name in names:
            self._since.pop(name, None)


class Absence:
    """Words for a proxy at `url` that is away, for which an operation waits up to `deadline` seconds; and for its
    coming back."""

    def __init__(self, url: str, deadline: float) -> None:
        self._url, self._deadline = url, deadline
        self.away = False

    def seen(self, *, away: bool) -> str | None:
        """A look at the proxy has shown that it is `away`, or that it is not: the line that says so, if that is new."""
        before, self.away = self.away, away
        if away == before:
            return None
        if away:
            return f"waiting up to {self._deadline:g} s for the proxy at {self._url}: it does not answer any more"
        return f"the proxy at {self._url} answers again"
