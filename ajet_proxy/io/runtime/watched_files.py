"""Whether files were changed, without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class WatchedFiles:
    """Files that may be written to, replaced or missing."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._files = tuple(files)
        self._seen: list[object] = []

    def changed(self) -> bool:
        """Whether one of them has changed since the last look; at the first look, whether there are any."""
        before, self._seen = self._seen, [_version(file) for file in self._files]
        return self._seen != before


def _version(file: str | Path) -> object:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
