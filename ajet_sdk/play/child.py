"""One child process with all that it starts: in a session of its own, which ends with its episode.

The thread that calls `Child.wait` blocks until the program exits, while another hands on its output line by line. Once
the program has exited, whatever it left running in its session is killed.

Invariant: when `wait` returns, everything that the program had written was handed on. What it wrote before it exited is
in the pipes by then. So they are emptied without waiting for their end: a process that left the session may hold them
open forever.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from ajet_sdk.errors import BadRequest

LINE_LIMIT = 64 * 1024
"""Longer lines are handed on in pieces."""
PIPE_LIMIT = 1 << 20
"""No pipe holds more, so that what comes after this many bytes was not written by the program that has exited."""

FILES_EACH, FILES_BESIDES = 8, 32
"""At most so many files are open for a program that runs, and for whatever else."""

OnLine = Callable[[str, bytes], None]
"""Gets ``"stdout"`` or ``"stderr"``, and a line of it."""
Limits = tuple[int, int]
"""Soft and hard."""


def allow_files(parallel: int) -> Limits:
    """Lets this process have as many open files as `parallel` programs need. Returns the limits as they were, which the
    programs may have. `BadRequest` if this process may not have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = parallel * FILES_EACH + FILES_BESIDES
    try:
        if soft < needed and soft != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):
        message = f"parallel {parallel} needs {needed} open files, and only {hard} are allowed (ulimit -Hn)"
        raise BadRequest(message, param="parallel") from None
    return soft, hard


class Child:
    """A running program. `on_line` gets its output line by line, from one thread.

    Its standard input is empty. `files` is its limit of open files, in place of this process's (on Linux, and from a
    moment after its start). `OSError` or `RuntimeError` when it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: OnLine,
        *,
        cwd: str | None = None,
        files: Limits | None = None,
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
        if files is not None and sys.platform == "linux":
            with suppress(OSError):  # it has ended already, or runs as another user
                resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, files)
        self._gone = threading.Event()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._pump = _Pump({"stdout": self._process.stdout, "stderr": self._process.stderr}, on_line)
        except BaseException:
            with self._process:  # which closes its pipes
                self._signal(signal.SIGKILL)
            raise

    def wait(self) -> int:
        """The exit code, negative for the signal that killed it; raises what a callback raised."""
        code = self._process.wait()
        self._gone.set()
        self._signal(signal.SIGKILL)
        self._pump.finish()
        return code

    def ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def end(self, grace: float) -> None:
        """Kills what has not ended within `grace` seconds, or as soon as this wait is interrupted."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, grace))  # also if nobody else waits, as after an interrupt
        finally:
            if not self._gone.is_set():
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for group in groups_of(self._process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


def groups_of(session: int) -> set[int]:
    """The process groups of a session, of which ``timeout`` and the jobs of a shell make more. Where there is no
    ``/proc``, that of its leader."""
    found = {session}
    with suppress(OSError):
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):  # it has ended
                if os.getsid(pid) == session:
                    found.add(os.getpgid(pid))
    return found


class _Lines:
    """Bytes in, lines out, each with its newline."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line + b"\n")
        if len(self._rest) >= LINE_LIMIT:
            self.flush()

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._on_line(rest)


class _Pump:
    """Reads pipes on a thread of its own until they end, or until they are empty after `finish` was called."""

    def __init__(self, pipes: Mapping[str, IO[bytes]], on_line: OnLine) -> None:
        self._pipes = [(pipe, _Lines(partial(on_line, stream))) for stream, pipe in pipes.items()]
        self._woken, self._wake = os.pipe()
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            os.close(self._woken)
            raise

    def finish(self) -> None:
        """Returns when all output is handed on; raises what a callback raised."""
        os.close(self._wake)
        self._thread.join()
        os.close(self._woken)
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            self._read()
            for _, lines in self._pipes:
                lines.flush()
        except Exception as error:
            self._fault = error
        finally:
            for pipe, _ in self._pipes:
                pipe.close()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe, lines in self._pipes:
                selector.register(pipe, selectors.EVENT_READ, lines)
            selector.register(self._woken, selectors.EVENT_READ)
            left, finishing, late = len(self._pipes), False, 0
            while left and late <= PIPE_LIMIT * len(self._pipes):
                ready = selector.select(0 if finishing else None)
                if finishing and not ready:
                    return
                for key, _ in ready:
                    if key.data is None:
                        finishing = True
                        selector.unregister(key.fileobj)
                    elif data := os.read(key.fd, LINE_LIMIT):
                        late += len(data) if finishing else 0
                        key.data.feed(data)
                    else:
                        left -= 1
                        selector.unregister(key.fileobj)
