"""One child process with all that it starts: in a session of its own, so that nothing of it outlives its episode.

The thread that calls `Child.wait` blocks until the program exits; a thread a pipe hands on its output line by line.
Once the program has exited, or `end` was called, whatever it left running in its session is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

LINE_LIMIT = 64 * 1024
"""Longer lines are handed on in pieces of this many bytes."""
PIPE_GRACE_S = 1.0
"""How long to go on reading from a pipe that a process outside the session still holds."""

OnLine = Callable[[bytes], None]


class Child:
    """A running program. `on_stdout` and `on_stderr` get its output line by line, each from a thread of its own.

    Its standard input is empty. `OSError` when it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        on_stdout: OnLine,
        on_stderr: OnLine,
        cwd: str | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._gone = threading.Event()
        self._readers = [
            threading.Thread(target=_pump, args=(pipe, on_line), daemon=True)
            for pipe, on_line in ((self._process.stdout, on_stdout), (self._process.stderr, on_stderr))
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """The exit code, negative for the signal that killed it, once all its output was handed on."""
        code = self._process.wait()
        self._gone.set()
        self._signal(signal.SIGKILL)
        for reader in self._readers:
            reader.join(PIPE_GRACE_S)
        return code

    def ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def end(self, grace: float) -> None:
        """Kills what has not ended within `grace` seconds, or as soon as this wait is interrupted."""
        try:
            self._gone.wait(grace)
        finally:
            if not self._gone.is_set():
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _pump(pipe: IO[bytes], on_line: OnLine) -> None:
    with pipe:
        while line := pipe.readline(LINE_LIMIT):
            on_line(line)


def describe(code: int) -> str:
    """An exit code in words: ``exit code 3``, ``killed by SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
