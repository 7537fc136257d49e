"""The programs that a run starts: whether this machine can run them, where they are, and that none outlives the run.

Each program gets a session of its own, so that Ctrl-C reaches only us and we end them in order. This process adopts
what they leave behind (Linux: child subreaper). So Ray's daemons and vLLM's workers are found and ended even if the
program that started them was killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ajet_sdk.errors import AjetError
from ajet_trainer.config import Config
from ajet_trainer.doctor import room
from integrations.quickstart.plan import Plan

BESIDE_B = 5e9
"""Bytes of memory, and of disk, that all but the trainer and its engine take: measured with SmolLM2-135M."""
PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE_S = 45.0
LAST_WORDS = 12
TICK_S = 0.2
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end of the whole quick start, children included."""


class QuickstartError(AjetError):
    """The quick start cannot begin, or one of its programs failed; the message is for the person who ran it."""


def check_machine(plan: Plan, folder: Path, model: Path) -> None:
    """Raises `QuickstartError` if disk, memory or the GPU will not do to train `model` in `folder`."""
    tables = plan.tables(model=model, proxy_url="", run_dir=folder)
    for found in room(Config(**tables["trainer"], verl=tables["verl"]), BESIDE_B):
        if found.level == "fault":
            raise QuickstartError(f"{found.message}: {found.advice}")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def path_of(name: str) -> str:
    """Path of one of our console scripts: next to this interpreter, else in the daemon's environment, else on PATH.

    The proxy lives in an environment of its own: in a checkout, `.venv` next to `.venv-engine`.
    """
    here = Path(sys.executable).parent
    near = [here / name, here.parent.parent / ".venv" / "bin" / name]
    if name == "ajet-proxy":
        near.reverse()
    found = next((str(path) for path in near if path.is_file()), None) or shutil.which(name)
    if found is None:
        raise QuickstartError(f"the program {name} is not here: `make setup` installs it, or put it on PATH")
    return found


def environment(proxy_url: str | None = None) -> dict[str, str]:
    """This process's environment without anything of ours, so that a run does not depend on the shell it began in."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("AJET_", "OPENAI_", "ANTHROPIC_"))
    }
    clean |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    return clean | {"AJET_PROXY_URL": proxy_url} if proxy_url else clean


def ticks(limit_s: float, complaint: str) -> Iterator[float]:
    """Seconds since the start, a few times a second; after `limit_s` it raises instead."""
    start = time.monotonic()
    while (seconds := time.monotonic() - start) < limit_s:
        yield seconds
        time.sleep(TICK_S)
    raise QuickstartError(f"{complaint} within {limit_s:.0f} s")


class Program:
    """One started program; its output goes to `log`. `nice` is added to its niceness, and to that of all it starts."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str], nice: int) -> None:
        self.name, self.log = name, log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=dict(env),
                start_new_session=True,
            )  # fmt: skip
        if nice:
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)

    @property
    def status(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self.process.poll()

    def check(self) -> None:
        """Raises `QuickstartError` with the last words of a program that has failed."""
        if self.status not in (None, 0):
            lines = self.log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
            said = "\n".join(f"  {line}" for line in lines)
            raise QuickstartError(f"{self.name} ended with status {self.status}; {self.log} ends with:\n{said}")

    def end(self) -> None:
        """Sends SIGTERM, and SIGKILL to its whole group if it does not end in time."""
        if self.status is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Children:
    """Starts programs and, on leaving the block, ends them newest first and then everything they left behind."""

    def __init__(self) -> None:
        self._programs: list[Program] = []

    def __enter__(self) -> Children:
        with suppress(OSError, AttributeError):  # systems that cannot adopt orphans go without
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._handlers = {number: signal.signal(number, signal.default_int_handler) for number in ENDINGS}
        return self

    def __exit__(self, *_: object) -> None:
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
        """`program` has ended and needs no care."""
        self._programs.remove(program)

    def check(self) -> None:
        """Raises `QuickstartError` if a program has failed."""
        for program in self._programs:
            program.check()


def descendants(root: int) -> list[int]:
    """Process ids below `root`, nearest first, zombies included."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += parents.get(process, [])
    return found[1:]


def end_descendants(grace_s: float = 5.0) -> None:
    """Sends SIGTERM to everything below this process, SIGKILL to what is left after `grace_s`, and reaps it all."""
    until = time.monotonic() + grace_s
    while (left := descendants(os.getpid())) and time.monotonic() < until + grace_s:
        number = signal.SIGTERM if time.monotonic() < until else signal.SIGKILL
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.1)
