"""Checks addresses of proxies and engines, and keys for them, so that every library on the way takes them.

`urllib.parse.urlsplit` takes nearly anything, and what it lets pass fails later, in a library's own words, at a place
that knows nothing of settings. Hosts are names (RFC 1123, with underscores; international ones in their ASCII form) or
IP addresses. The scheme is written small, so that code that looks for ``https:`` finds it.
"""

from __future__ import annotations

import ipaddress
import re

_URL = re.compile(
    r"(?P<scheme>https?)://([^/?#@\[\]\\]*@)?(\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))"
    r"(:(?P<port>[0-9]{1,5})?)?(/[^?#\\ ]*)?",
    re.ASCII,
).fullmatch
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?").fullmatch
_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}").fullmatch


def server(url: str) -> tuple[str, int] | None:
    """Host and port of a base URL, such as ``http://127.0.0.1:8484`` or ``https://gpu.example.com/front``; None for
    what is none."""
    found = _URL(url) if url.isprintable() else None
    if found is None:
        return None
    host = (found["six"] or found["host"]).lower()
    try:
        if found["six"]:
            ipaddress.IPv6Address(host)
        elif _NUMBERS(host):
            ipaddress.IPv4Address(host)
        elif not _NAME(host):
            return None
    except ValueError:
        return None
    port = int(found["port"] or (443 if found["scheme"] == "https" else 80))
    return (host, port) if 0 < port < 65536 else None


def is_here(url: str) -> bool:
    """True if `url` has a loopback address (RFC 1122, RFC 4291), or the name ``localhost``."""
    host, _ = server(url) or ("", 0)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".") == "localhost"


def is_key(text: str) -> bool:
    """True if a header can carry `text` behind ``Bearer`` (RFC 6750 allows less)."""
    return text.isascii() and text.isprintable() and " " not in text
