"""The programs that a run starts, and the certainty that none of them outlives it.

Each program gets a session of its own, so that Ctrl-C reaches only us and we end them in order. This process adopts
whatever they leave behind (Linux: child subreaper), so that Ray's daemons and vLLM's workers are found and ended even
if the program that started them was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ajet_trainer.quickstart.machine import QuickstartError

PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE_S = 45.0


class Program:
    """One started program; its output goes to `log`. `nice` is added to its niceness, and to that of all it starts."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str], nice: int = 0) -> None:
        self.name, self.log = name, log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        if nice:
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)

    @property
    def status(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self.process.poll()

    def check(self) -> None:
        """Raises `QuickstartError` with the last words of a program that has failed."""
        if self.status not in (None, 0):
            raise QuickstartError(
                f"{self.name} ended with status {self.status}; {self.log} ends with:\n{self.last_words()}"
            )

    def last_words(self, lines: int = 12) -> str:
        return "\n".join("  " + line for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask_to_end(self) -> None:
        if self.status is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, grace_s: float = TERM_GRACE_S) -> None:
        """SIGTERM, and SIGKILL to its whole group if it does not end in time."""
        self.ask_to_end()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Whoever sends one of these wants the whole quick start to end, children included."""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class Children:
    """Starts programs and, on leaving the block, ends them newest first and then everything they left behind."""

    def __init__(self) -> None:
        self._programs: list[Program] = []

    def __enter__(self) -> Children:
        adopt_orphans()
        self._handlers = {number: signal.signal(number, _interrupt) for number in ENDINGS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in ENDINGS:  # a second Ctrl-C must not leave half of them running
            signal.signal(number, signal.SIG_IGN)
        try:
            for program in reversed(self._programs):
                program.end()
            end_descendants()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str], nice: int = 0) -> Program:
        program = Program(name, argv, log, env, nice)
        self._programs.append(program)
        return program

    def finished(self, program: Program) -> None:
        """`program` has ended and need not be looked after any more."""
        self._programs.remove(program)

    def check(self) -> None:
        """Raises `QuickstartError` if a program has failed."""
        for program in self._programs:
            program.check()


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process. A no-op where the system has no such thing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, nearest first, zombies included."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        below = parents.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def end_descendants(grace_s: float = 5.0) -> None:
    """SIGTERM to everything below this process, SIGKILL to what is left after `grace_s`, and reaps it all."""
    until = time.monotonic() + grace_s
    number = signal.SIGTERM
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if time.monotonic() > until:
            number = signal.SIGKILL
        if time.monotonic() > until + grace_s:
            return
        _reap()
        time.sleep(0.1)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
