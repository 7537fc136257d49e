"""Files that are watched for changes, without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class WatchedFiles:
    """Files that may be written to, replaced or missing."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._files = tuple(files)
        self._seen: list[object] = []

    def changed(self) -> list[object] | None:
        """The files' versions, if one of them has changed since they were `taken`; None if not. Before that, they have
        changed if there are any."""
        now = [_version(file) for file in self._files]
        return None if now == self._seen else now

    def taken(self, seen: list[object]) -> None:
        """Notes that what `changed` has told was read. Until then it tells it again: who could not read tries once
        more."""
        self._seen = seen


def _version(file: str | Path) -> object:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
