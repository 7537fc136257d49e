"""Finds who listens on a port of this host, so that whoever wants it can be told."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LISTENS = "0A"
"""A listening socket's state in /proc/net/tcp (proc(5))."""


def listener(port: int) -> str | None:
    """The program that listens on `port`, as ``vllm (process 7)``; None if there is none, or no /proc."""
    wanted = set[str]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
                if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port:
                    wanted.add(f"socket:[{row[9]}]")
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(process / "fd" / name) in wanted for name in os.listdir(process / "fd")):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return "a program of another user" if wanted else None
