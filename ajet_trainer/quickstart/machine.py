"""Whether this machine can do it, asked before anything is started; each no says what to do about it."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

from ajet_sdk.errors import AjetError

DISK_GB = 6.0
MEMORY_GB = 7.0


class QuickstartError(AjetError):
    """The quick start cannot begin, or one of its programs failed; the message is for the person who ran it."""


def check(folder: Path, port: int) -> None:
    """Raises `QuickstartError` if disk, memory or port will not do."""
    free = shutil.disk_usage(nearest_existing(folder)).free / 1e9
    if free < DISK_GB:
        raise QuickstartError(
            f"{folder} has {free:.1f} GB of free disk; {DISK_GB:.0f} GB are needed: give another --run-dir"
        )
    memory = available_memory()
    if memory is not None and memory < MEMORY_GB:
        raise QuickstartError(
            f"{memory:.1f} GB of memory are free; {MEMORY_GB:.0f} GB are needed: end other programs first"
        )
    if port and not port_is_free(port):
        raise QuickstartError(f"port {port} is taken: give another --port, or 0 for any free one")


def program(name: str) -> str:
    """Path of one of our console scripts: beside this interpreter, else in the daemon's environment, else on PATH.

    The proxy lives in an environment of its own: in a checkout, `.venv` beside `.venv-engine`.
    """
    here = Path(sys.executable).parent
    beside = [here / name, here.parent.parent / ".venv" / "bin" / name]
    if name == "ajet-proxy":
        beside.reverse()
    for path in beside:
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise QuickstartError(f"the program {name} is not here: `make setup` installs it, or put it on PATH")
    return found


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the first of its parents that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def available_memory() -> float | None:
    """GB of memory that new programs can have, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kilobytes[0] * 1024 / 1e9 if kilobytes else None


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
