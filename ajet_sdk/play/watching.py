"""The file of a program that changes while the program is run, and programs that fail as soon as they begin.

Idea: a file is looked at twice a second. When it has changed, and then stays as it is for a moment, a callback is
called once. Programs that fail at once, one after the other and without a call to a model, are most likely broken.
Going on would only burn tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ajet_sdk.errors import AjetError

LOOK_S, SETTLE_S = 0.5, 0.1
QUICK_S = 2.0
"""A program that fails within this time has failed at once."""
LEAST_STREAK = 3


class Watch:
    """Calls `on_change` from a thread of its own each time that the code has changed which `digest` tells (None: not
    now); a context manager."""

    def __init__(
        self, digest: Callable[[], str | None], on_change: Callable[[], None], *, look_s: float = LOOK_S
    ) -> None:
        self._digest, self._on_change, self._look_s = digest, on_change, look_s
        self._seen = digest()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._look_s):
            now = self._digest()
            if now in (None, self._seen):  # gone, as while an editor puts another in its place
                continue
            while not self._stopped.wait(SETTLE_S) and (later := self._digest()) != now:
                now = later
            if now is not None and not self._stopped.is_set():
                self._seen = now
                self._on_change()


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
