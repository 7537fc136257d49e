"""Ends the programs of a run that was killed, or left them behind: nobody else is left who could.

Idea: a small process of the run's own holds the read end of a pipe. When that ends without a goodbye, the run is dead.
Whatever has the run's mark in its environment then is one of its programs, or was started by one. Their sessions are
killed. A program inside another run has the marks of both. Where there is no ``/proc``, nothing of this happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress

ROUNDS, QUIET, PAUSE_S = 100, 5, 0.1
"""Looks at most, looks that must find nothing one after another, and the time between two."""
MARK = "AJET_RUN_"
"""The beginning of the name of the variable."""
GOODBYE = b"."
GOODBYE_S = 5.0


class Guardian:
    """Use it as a context manager around the run; `mark` is what its programs have in their environment. A block that
    an exception ends has left its programs behind."""

    def __init__(self) -> None:
        self._name = MARK + uuid.uuid4().hex
        self.mark = {self._name: "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guardian:
        if sys.executable and os.access("/proc/self/environ", os.R_OK):
            with suppress(OSError):
                self._process = subprocess.Popen(
                    (sys.executable, "-I", "-S", __file__, self._name), stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                )  # fmt: skip
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._process is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._process.communicate(GOODBYE if kind is None else b"", GOODBYE_S)


def marked(name: str) -> set[int]:
    """The processes of this user that have the variable `name`, and all others in their sessions."""
    sessions: dict[int, int] = {}
    found: set[int] = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended, or is another user's
            sessions[pid] = os.getsid(pid)
            with open(f"/proc/{pid}/environ", "rb") as file:
                if b"\0" + name.encode() + b"=" in b"\0" + file.read():
                    found.add(pid)
    theirs = {sessions[pid] for pid in found}
    return {pid for pid, session in sessions.items() if session in theirs} - {os.getpid()}


def kill_all(name: str) -> None:
    """Kills what is marked until none is left. One that is being started has its mark only a moment later."""
    quiet = 0
    for _ in range(ROUNDS):
        found = marked(name)
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if quiet == QUIET:
            return
        time.sleep(PAUSE_S)


def main() -> None:
    if not sys.stdin.buffer.read():
        kill_all(sys.argv[1])


if __name__ == "__main__":
    main()
