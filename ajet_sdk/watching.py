"""The file of a program that changes while the program is run, and programs that fail as soon as they begin.

Idea: a file is looked at twice a second. When it has changed, and then stays as it is for a moment, who asked for it is
told once. Programs that fail at once, one after the other and without a call to a model, are most likely broken. Going
on would only burn tasks.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ajet_sdk.errors import AjetError

LOOK_S, SETTLE_S = 0.5, 0.1
QUICK_S = 2.0
"""A program that fails within this time has failed at once."""
LEAST_STREAK = 3
Stamp = tuple[int, int, int]


def program_file(argv: Sequence[str], cwd: str | None = None) -> Path | None:
    """The file that holds the program: the first word behind the interpreter that is a file, else the command itself
    where it is written as a path. None for a command that is looked up."""
    folder = Path(cwd or ".")
    words = [folder / word for word in argv[1:] if not word.startswith("-")]
    found = next((path for path in words if _is_file(path)), None)
    if found is None and os.sep in argv[0] and _is_file(folder / argv[0]) and shutil.which(argv[0]):
        found = folder / argv[0]
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a word that is too long for a path, or that none can be
        return False


def stamp(path: Path) -> Stamp | None:
    """What changes when the file does; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Watch:
    """Calls `on_change` from a thread of its own each time that the file at `path` has changed; a context manager."""

    def __init__(self, path: Path, on_change: Callable[[], None], *, look_s: float = LOOK_S) -> None:
        self._path, self._on_change, self._look_s = path, on_change, look_s
        self._seen = stamp(path)
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
            now = stamp(self._path)
            if now in (None, self._seen):  # gone, as while an editor puts another in its place
                continue
            while not self._stopped.wait(SETTLE_S) and stamp(self._path) != now:
                now = stamp(self._path)
            self._seen = now
            if not self._stopped.is_set():
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
        """Whether nothing may begin; `AjetError` if that will not change."""
        if self._failed < self._most:
            return False
        if not self._waits:
            raise AjetError(f"{self._words()}: nothing more is begun. Mend it and start again")
        return True

    def _words(self) -> str:
        return f"the program failed {self._most} times in a row within {QUICK_S:g} s, without a call to a model"
