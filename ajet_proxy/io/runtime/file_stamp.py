"""Whether a file was changed, without reading it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, int, int] | None


def stamps(files: Iterable[str | Path]) -> list[Stamp]:
    """What differs as soon as one of `files` was written to or replaced; None for one that is not there."""
    return [_stamp(file) for file in files]


def _stamp(file: str | Path) -> Stamp:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
