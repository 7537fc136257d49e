"""Which addresses lead back to this proxy. No engine can be there: each request would be one more to itself.

An address has many spellings (``localhost``, ``0.0.0.0``, ``[::ffff:127.0.0.1]``, the machine's name), so what counts
is where a connection would go. A name is looked up only where the port is ours. A listener at ``::`` hears IPv6 alone,
because asyncio makes its sockets so. This cannot know everything, such as another daemon whose engine is this one. Such
a loop ends at the name that each request bears (`Headers.came_through`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from ajet_sdk.address import server

Address = tuple[str, int]
_LOOPBACK: dict[int, IPv4Address | IPv6Address] = {4: IPv4Address("127.0.0.1"), 6: IPv6Address("::1")}
_ANY_PORT = 9


def leads_here(url: str, listening: Iterable[Address], public_url: str | None = None) -> bool:
    """True if the base URL `url` leads here. Agents may know this proxy by it, or a connection to it would come to one
    of the addresses where it is `listening`."""
    host, port = at = server(url) or ("", 0)
    if public_url is not None and at == server(public_url) and _path(url) == _path(public_url):
        return True
    ours = [own for own, at in listening if at == port]
    return bool(ours) and any(_meet(one, own) for one in _found(host) for name in ours for own in _found(name))


def _path(url: str) -> str:
    """The path of a base URL, which may end in ``/v1`` or not."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1").rstrip("/")


def _found(host: str) -> set[IPv4Address | IPv6Address]:
    """The addresses of `host`; none for a name that nobody knows."""
    try:
        told = [str(item[4][0]) for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return set()
    return {_plain(ip_address(text.partition("%")[0])) for text in told}


def _plain(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """`ip`, as an IPv4 address if it is one in the form of IPv6."""
    return ip.ipv4_mapped if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None else ip


def _meet(asked: IPv4Address | IPv6Address, own: IPv4Address | IPv6Address) -> bool:
    """True if a listener at `own` hears a connection to `asked`. To connect to the unspecified address is to connect to
    this machine; to listen there is to listen at all of its addresses of that version."""
    if asked.is_unspecified:
        asked = _LOOPBACK[asked.version]
    return asked == own or (own.is_unspecified and own.version == asked.version and _is_of_this_machine(asked))


def _is_of_this_machine(ip: IPv4Address | IPv6Address) -> bool:
    """True if a connection to `ip` stays here: the system would then make it from the same address. No packet is sent
    to find that out."""
    if ip.is_loopback:
        return True
    try:
        with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect((str(ip), _ANY_PORT))
            return ip_address(probe.getsockname()[0]) == ip
    except OSError:
        return False
