"""A TCP port that was free a moment ago, for programs that cannot report the port that the system chose for them."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
