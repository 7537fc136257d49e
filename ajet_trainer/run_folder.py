"""The folder of a run: who holds it, which run it is, and files in it that are whole or not there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import IO, Any

LOCK = "lock"
"""The file that a run locks for as long as it lives."""
PRIVATE = 0o600


def hold(run_dir: Path, name: str = LOCK) -> IO[str]:
    """A lock on `run_dir`, by its file `name`, for as long as the returned file is open. Raises `BlockingIOError` if
    another process has it. It is a record lock, since children that outlive a killed run must not have it. File systems
    without locks go without."""
    file = (run_dir / name).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise BlockingIOError(error.errno, "locked") from None
    return file


def word_in(path: Path) -> str:
    """The word in the file at `path`, drawn at random where it has none. Who asks holds its folder."""
    word = path.read_text().strip() if path.exists() else ""
    if not word:
        word = secrets.token_hex(8)
        put(path, word + "\n", PRIVATE)
    return word


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def put(path: Path, text: str, mode: int = 0o644, *, lasting: bool = True) -> None:
    """Puts `text` into the file at `path`, all of it or nothing. If it is `lasting`, that also holds after a power cut,
    for which the disk is waited for. With `PRIVATE`, its owner alone may read it."""
    temporary = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def sync(folder: Path) -> None:
    """Returns when all in `folder` is on disk, whoever wrote it, so that a power cut takes nothing of it. Raises
    `OSError` for what the disk does not take."""
    for path in (*folder.rglob("*"), folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        except OSError:
            if path.is_file():  # some file systems sync no folders
                raise
        finally:
            os.close(file)
