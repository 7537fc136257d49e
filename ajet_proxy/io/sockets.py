"""Connections whose other host may be gone without a word: the system asks, and breaks them off some two minutes later.

Without that a connection on which nothing is to be sent lasts for ever, and one with something under way for as long as
the system repeats itself, which is a quarter of an hour (tcp(7)).
"""

from __future__ import annotations

import socket

import aiohttp

WATCH = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds of silence before the system asks, and between questions; and how many of those go unanswered."""
UNTAKEN_S = 120.0
"""For how long what was sent may go unanswered."""


def watched(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for `address` that is watched."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    watch(made)
    return made


def watch(made: socket.socket, untaken_s: float = UNTAKEN_S) -> None:
    """Have the system watch a connection over TCP. What was sent may go untaken, by a host that is gone or a program
    that does not read, for `untaken_s`."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (WATCH | {"TCP_USER_TIMEOUT": int(1000 * untaken_s)}).items():
        if hasattr(socket, name):  # not every system has them all
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
