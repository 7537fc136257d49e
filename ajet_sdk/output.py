"""What commands write, to standard streams that may be closed, full, or of an encoding that holds few characters.

Invariant: no episode suffers for what cannot be shown of it.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_sdk.episodes import Episode


def open_streams() -> None:
    """Has a standard stream that was closed read and write nothing, and standard output show ``?`` for what its
    encoding does not hold (standard error shows that by its number)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def say(line: str) -> None:
    """A line on standard error, if anything can be written there."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Copies:
    """Copies programs' output to ours, line by line; if `named`, with the episode before each line.

    What cannot be written is lost, and `lost` says why; nothing is lost on a reader that left.
    """

    def __init__(self, *, named: bool) -> None:
        self.at_line_start = True
        self.lost: OSError | None = None
        self._named = named
        self._writing = threading.Lock()

    def __call__(self, episode: Episode, stream: str, line: bytes) -> None:
        out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        if self._named:
            line = f"[{episode.id}] ".encode() + line.rstrip(b"\r\n") + b"\n"
        with self._writing:
            self.at_line_start = line.endswith(b"\n")
            try:
                out.write(line)
                out.flush()
            except BrokenPipeError:  # who reads no more of it may still want the episodes
                pass
            except OSError as error:
                self.lost = error
