"""The file of a program that changes while the program is run, and programs that fail as soon as they begin.

Idea: a file has changed once it is another one at two looks in a row, because it may be looked at while it is written.
Programs that fail at once, one after the other and without a call to a model, are most likely broken. Going on would
only burn tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ajet_sdk.errors import AjetError

QUICK_S = 2.0
"""A program that fails within this time has failed at once."""
LEAST_STREAK = 3


class Changes:
    """Sees changes of the code that `digest` tells (None: not now, as while an editor puts another in its place)."""

    def __init__(self, digest: Callable[[], str | None]) -> None:
        self._digest = digest
        self._seen = self._last = digest()

    def look(self) -> bool:
        """True if the code has changed, once for each change."""
        before, self._last = self._last, self._digest()
        if self._last in (None, self._seen) or self._last != before:
            return False
        self._seen = self._last
        return True


class Streak:
    """Counts programs that fail as soon as they begin. After `most` in a row nothing may begin: until the program has
    changed if that is waited for, and else the run ends."""

    def __init__(self, most: int, *, waits: bool, say: Callable[[str], None] = lambda line: None) -> None:
        self._most, self._waits, self._say = max(LEAST_STREAK, most), waits, say
        self._failed = 0
        self._lock = threading.Lock()

    def began(self, *, well: bool) -> None:
        """A program has begun, and did not fail at once if it began `well`."""
        with self._lock:
            before, self._failed = self._failed, 0 if well else self._failed + 1
        if before < self._most <= self._failed and self._waits:
            self._say(f"{self._words()}. Nothing more begins until its file changes")

    def changed(self) -> None:
        """The program is another one now."""
        with self._lock:
            self._failed = 0

    def held(self) -> bool:
        """True if nothing may begin; `AjetError` if that will not change."""
        if self._failed < self._most:
            return False
        if not self._waits:
            raise AjetError(f"{self._words()}: nothing more is begun. Mend it and start again")
        return True

    def _words(self) -> str:
        return f"the program failed {self._most} times in a row within {QUICK_S:g} s, without a call to a model"
