"""The notes of what a process saw, one JSON object a line, kept by itself and outside the proxy: the other side of
every comparison.

A process may be killed at any byte, so each life has a file of its own, of which only whole lines count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def appending(path: Path) -> Callable[[Any], object]:
    """Adds lines to a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return lambda note: os.write(file, (json.dumps(note) + "\n").encode())


class Notes:
    """Appends to one file."""

    def __init__(self, path: Path) -> None:
        self._append = appending(path)

    def add(self, kind: str, **fields: Any) -> None:
        self._append({"kind": kind} | fields)


class Reader:
    """The notes in some files, each once."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}

    def new(self, *paths: Path) -> Iterator[dict[str, Any]]:
        """Those that were added since the last look; a file that is not there yet has none."""
        for path in filter(Path.exists, paths):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] = self._read.get(path, 0) + len(line)
                    yield json.loads(line)


def replace(path: Path, text: str) -> None:
    """That is what a file says from now on; nobody ever reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """All notes in a file."""
    return Reader().new(path)
