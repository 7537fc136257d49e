"""Settings that every process of the daemon makes for itself, and its calls to the C library."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import hashlib
import logging
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from ajet_sdk.ports import listener

TURN_S = 0.001
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
WORKER = "ajet-worker"
"""A worker's name to the kernel, for interception to know it by."""


def endings() -> tuple[signal.Signals, ...]:
    """The signals that end the daemon. SIGHUP of a closed terminal is one, unless somebody (nohup) has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def log_to_stderr() -> None:
    """Our own messages from INFO on, others' from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("ajet_proxy").setLevel(logging.INFO)


def allow_many_connections() -> None:
    """A held agent is an open file, and a thousand agents are usual: take as many as the machine lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def become_child(name: str) -> None:
    """Have the kernel call this process `name`, and kill it once the one that started it is gone, even if it hangs.
    Outside Linux nothing is done."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NAME, name.encode())


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel `task`, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def program() -> str:
    """A digest of the proxy's own code as it is installed now."""
    package = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path for part in (package, package.with_name("ajet_sdk")) for path in part.rglob("*.py")):
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def give_memory_back() -> None:
    """Give blocks that are free between others in use back to the system, as malloc_trim(3) does. Records of all sizes
    come and go here: without this their gaps would add up to as much as what is in use. Outside glibc nothing is
    done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def take_short_turns() -> None:
    """Hand the interpreter over more often than Python's own 5 ms. A thread that makes a large answer then delays each
    step of the event loop by a millisecond at most."""
    sys.setswitchinterval(TURN_S)


def look_for_garbage_less() -> None:
    """Spend less on garbage collection, since nearly all that a daemon holds is alive. What there is by now is never
    searched for cycles again. What comes later is searched in larger portions than Python's own."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """`error`, of a socket that could not listen there, in one line that says what to do about it."""
    reason, advice = (error.strerror or str(error)).rpartition(": ")[2].lower(), ""
    if error.errno == errno.EADDRINUSE:
        advice = f" by {listener(port) or 'another program'}: stop that, or give another --listen"
    return OSError(error.errno, f"cannot listen on {host}:{port}: {reason}{advice}")
