"""How many things a request is made of: what bounds the work on it, which is done while everybody else waits.

A body is read at the speed of C; what is then asked of each message, item, part and call (whose history is it, is it
what was sampled) costs some microseconds each, and a few megabytes can hold a million of them. So a request may have
only so many messages, and so many objects and lists in all. Arguments of tool calls are texts that hold JSON, and what
they hold counts as well.

Most requests are too short to have as many, or have too few brackets; only of what is left is every object looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from ajet_sdk.errors import TooLarge

EACH = 5
"""So many objects and lists a request may have for each message that it may have."""
_LISTS = ("messages", "input")


def check(text: str, fields: Mapping[str, Any], most: int) -> None:
    """`TooLarge` if the request `text`, which says `fields`, has more than `most` messages or items, or more in them
    than `EACH` times that."""
    for name in _LISTS:
        if isinstance(told := fields.get(name), list) and len(told) > most:
            raise _too_large(f"{name} has {len(told)} entries, and may have {most}", name)
    if _brackets(text) > EACH * most and _holds_more(fields, EACH * most):
        raise _too_large(f"the body holds more than {EACH * most} objects and lists", None)


def _brackets(text: str) -> int:
    """At least as many as there are objects and lists, those within texts too."""
    return text.count("{") + text.count("[") + text.count("\\u00")


def _holds_more(value: Any, most: int) -> bool:
    """Whether there are more than `most` objects and lists in `value`."""
    found, rest = 0, [value]
    while rest:
        one = rest.pop()
        found += 1
        if isinstance(one, dict):
            if isinstance(written := one.get("arguments"), str):
                found += written.count("{") + written.count("[")
            one = one.values()
        rest += islice((inner for inner in one if isinstance(inner, dict | list)), most)
        if found + len(rest) > most:
            return True
    return False


def _too_large(what: str, param: str | None) -> TooLarge:
    return TooLarge(f"the request is too large to be read: {what}", code="too_many_messages", param=param)
