"""Options of connections whose other host may be gone without a word: the system asks, and breaks them off.

Without them a connection with nothing to send lasts forever. One with something under way lasts as long as the system
repeats itself, which is a quarter of an hour (tcp(7)).
"""

from __future__ import annotations

import socket

WATCH = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds of silence before the system asks, and between questions; and how many of those go unanswered."""
UNTAKEN_S = 120.0
"""For how long what was sent may go unanswered."""


def watching(untaken_s: float = UNTAKEN_S) -> list[tuple[int, int, int]]:
    """Level, name and value of each option, as `socket.setsockopt` takes them. What was sent may go untaken for
    `untaken_s`, by a host that is gone or a program that does not read."""
    wanted = WATCH | {"TCP_USER_TIMEOUT": int(1000 * untaken_s)}
    known = [name for name in wanted if hasattr(socket, name)]  # not every system has them all
    tcp = [(socket.IPPROTO_TCP, getattr(socket, name), wanted[name]) for name in known]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *tcp]
