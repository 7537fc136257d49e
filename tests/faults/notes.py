"""What a process saw, one JSON object a line, kept by itself and outside the proxy: the other side of every comparison.

A process may be killed at any byte, so each life has a file of its own, of which only whole lines count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Notes:
    """Appends to one file."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, kind: str, **fields: Any) -> None:
        os.write(self._descriptor, (json.dumps({"kind": kind} | fields) + "\n").encode())


class Reader:
    """The notes of everybody in `folder`, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] = self._read.get(path, 0) + len(line)
                    yield json.loads(line)
