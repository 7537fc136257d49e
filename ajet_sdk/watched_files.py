"""Files that are read again whenever they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ajet_sdk.settings import ConfigError

T = TypeVar("T")


class WatchedFiles:
    """Files that may be written to, replaced or missing. `stays` is what is said by `say` while they cannot be read,
    such as "the keys stay as they were"."""

    def __init__(self, stays: str, files: Iterable[str | Path], say: Callable[[str], None]) -> None:
        self._stays, self._say = stays, say
        self._files = tuple(files)
        self._seen: list[object] = []
        self._fault = ""

    def take(self, read: Callable[[], T]) -> T | None:
        """The result of `read`, if a file has changed since it last succeeded; None if not. A failure is said
        once, and the files are read again at the next look."""
        now = [_version(file) for file in self._files]
        if now == self._seen:
            return None
        try:
            found = read()
        except (OSError, ConfigError) as error:
            if str(error) != self._fault:
                self._say(f"{self._stays}: {error}")
            self._fault = str(error)
            return None
        self._seen, self._fault = now, ""
        return found


def _version(file: str | Path) -> object:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
