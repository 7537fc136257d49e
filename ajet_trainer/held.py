"""A trainer that holds its run folder from its first instruction on, and the ways to find, see and end it again.

A supervisor may be killed between the start of a trainer and any note of it. So the trainer makes the note. This module
is what starts: it takes the lock of the run folder, writes `started.json`, and becomes the trainer, which keeps the
lock (record locks outlive an exec). Who asks for the lock is told the process that has it.

Invariant: of one run folder at most one process gets beyond this module.

    python -m ajet_trainer.held RUN_DIR STARTS PROGRAM ARGUMENT…
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ajet_sdk.errors import AjetError
from ajet_trainer.run_folder import LOCK, PRIVATE, put, read_json

TAKEN = 75
"""The exit code of one that came second."""
_FLOCK = struct.Struct("hhqqi4x")


class NoLocks(AjetError):
    """It cannot be told who holds a folder: the file system has no record locks, or the file is another user's."""


def become(run_dir: Path, starts: int, command: list[str]) -> NoReturn:
    """Takes the run folder and becomes `command`; exits with `TAKEN` if another process has it."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also where there are no locks: nobody can keep a run there
        sys.exit(TAKEN)
    start = {"pid": os.getpid(), "starts": starts, "word": uuid.uuid4().hex}
    put(run_dir / "started.json", json.dumps(start), PRIVATE)
    os.set_inheritable(descriptor, True)
    os.execv(command[0], command)


def holder(run_dir: Path) -> int | None:
    """The process that holds `run_dir`; None if there is none. Raises `NoLocks`."""
    try:
        with (run_dir / LOCK).open("rb+") as file:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except FileNotFoundError:
        return None
    except OSError as error:
        said = "keep runs elsewhere, on a file system with locks and in folders of this user"
        raise NoLocks(f"it cannot be told who holds {run_dir} ({error}): {said}") from None
    return None if kind == fcntl.F_UNLCK else int(pid)


def started(run_dir: Path, pid: int) -> dict[str, Any]:
    """The note that the process `pid`, which holds `run_dir`, wrote when it started; empty until it has."""
    found = read_json(run_dir / "started.json")
    return found if found.get("pid") == pid else {}


def tell_to_end(run_dir: Path, pid: int) -> None:
    """SIGTERM for `pid`, if it is still the one that holds `run_dir`."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if holder(run_dir) == pid:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            os.close(handle)


if __name__ == "__main__":
    become(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
