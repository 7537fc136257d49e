"""Whether a file was changed, without reading it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FileVersion = tuple[int, int, int] | None


def file_versions(files: Iterable[str | Path]) -> list[FileVersion]:
    """What differs as soon as one of `files` was written to or replaced; None for one that is not there."""
    return [_version(file) for file in files]


def _version(file: str | Path) -> FileVersion:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
