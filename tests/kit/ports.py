"""A TCP port for programs that cannot report the port that the system chose for them.

From below the ports that systems give to outgoing connections (32768 and up), and above those of Ray's workers (10002
to 19999): until the program has bound it, nothing that runs beside it is likely to take it.
"""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port of loopback's that was free a moment ago."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
