"""Fields of a request as the engine reads them: it takes ``"true"`` and ``1`` for true, and ``"2"`` and ``2.0`` for 2.

The proxy must come to the same reading, or it would count fewer choices than come. What the engine cannot read it
refuses; here such a value is None, as if it had been left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("0", "off", "f", "false", "n", "no")
_INTEGER = re.compile(r"([+-]?\d+(?:_\d+)*)(?:\.0*)?", re.ASCII).fullmatch


def flag(request: Mapping[str, Any], name: str) -> bool | None:
    """The truth value `name`; None where it is left out, null or unreadable."""
    value = request.get(name)
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def unread(request: Mapping[str, Any], name: str) -> bool:
    """Whether the truth value `name` is there and cannot be read, so that the engine must see it and refuse it."""
    return request.get(name) is not None and flag(request, name) is None


def integer(request: Mapping[str, Any], name: str) -> int | None:
    """The whole number `name`; None where it is left out, null or unreadable."""
    value = request.get(name)
    if isinstance(value, str):
        found = _INTEGER(value.strip()) if len(value) < 100 else None
        return int(found[1]) if found else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else None
    return int(value) if isinstance(value, int) else None
