"""Connections whose other host may be gone without a word: the system asks, and breaks them off some two minutes later.

Without that a connection on which nothing is to be sent lasts for ever, and one with something under way for as long as
the system repeats itself, which is a quarter of an hour (tcp(7)).
"""

from __future__ import annotations

import socket

import aiohttp

WATCH = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
"""Seconds of silence before the system asks, and between questions; how many go unanswered; and for how many
milliseconds what was sent may."""


def watched(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for `address` that is watched."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    watch(made)
    return made


def watch(made: socket.socket) -> None:
    """Have the system watch a connection over TCP."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in WATCH.items():
        if hasattr(socket, name):  # not every system has them all
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
