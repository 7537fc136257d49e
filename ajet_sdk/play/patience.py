"""Says what a run waits for, if that takes long.

Idea: what is waited for begins and ends, under a name. Once one of them has lasted for a while, a line says why; and
again every few minutes. What ends soon is never spoken of. Several threads may tell of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONG_S = 15.0
AGAIN_S = 300.0


class Patience:
    """Calls `say` with what is waited for."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._since: dict[str | None, float] = {}
        self._said = float("-inf")
        self._lock = threading.Lock()

    def waits(self, name: str | None, why: str | None, since: float) -> None:
        """`name` is being waited for, at least `since` then. Without a `why` that needs no word."""
        if why is None:
            self.ends(name)
            return
        with self._lock:
            now, began = self._clock(), self._since.setdefault(name, since)
            if now - began < LONG_S or now - self._said < AGAIN_S:
                return
            self._said = now
        self._say(f"waiting: {why}")

    def ends(self, *names: str | None) -> None:
        """These are waited for no more."""
        with self._lock:
            for name in names:
                self._since.pop(name, None)


class Absence:
    """Says once that the proxy at `url` is away, how long is waited for it (`deadline`, in seconds), and that it is
    back."""

    def __init__(self, say: Callable[[str], None], url: str, deadline: float) -> None:
        self._say, self._url, self._deadline = say, url, deadline
        self.away = False

    def missed(self) -> None:
        """A look at it found nothing."""
        if not self.away:
            self._say(f"waiting up to {self._deadline:g} s for the proxy at {self._url}: it does not answer any more")
        self.away = True

    def heard(self) -> None:
        """It has answered."""
        if self.away:
            self._say(f"the proxy at {self._url} answers again")
        self.away = False
