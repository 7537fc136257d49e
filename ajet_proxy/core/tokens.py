"""Token ids as bytes: int32 in native byte order, so that a memcmp replaces a loop over tokens.

Positions and lengths are in tokens everywhere; only this module and `ajet_sdk.tree` multiply by the width of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from ajet_sdk.tree import WIDTH as WIDTH
from ajet_sdk.tree import common_prefix as common_prefix

NOT_SO = (ValidationError, UnicodeEncodeError)
"""Errors that msgspec's `convert` raises for a value of another type; the second for half a surrogate pair."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_TokenIds = list[TokenId]


def are_tokens(values: Any) -> bool:
    """Tell whether `values` is a list of token ids, which `pack_tokens` takes."""
    if not isinstance(values, list):
        return False
    try:
        convert(values, _TokenIds)
    except NOT_SO:
        return False
    return True


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Ids that fit into 32 bits, as text."""
    return Struct(f"@{len(ids)}i").pack(*ids)


def unpack_tokens(text: bytes) -> tuple[int, ...]:
    return tuple(memoryview(text).cast("i"))


def count(text: bytes) -> int:
    """Tokens in `text`."""
    return len(text) // WIDTH


def is_long(text: bytes, length: int) -> bool:
    """Tell whether `text` is exactly `length` tokens."""
    return len(text) == length * WIDTH


def cut(text: bytes, start: int, end: int) -> bytes:
    """The tokens ``[start, end)`` of `text`."""
    return text[start * WIDTH : end * WIDTH]


def stands_at(text: bytes, part: bytes, at: int) -> bool:
    """Tell whether the tokens `part` stand at position `at` of `text`."""
    return text.startswith(part, at * WIDTH)


def find(text: bytes, part: bytes, start: int, end: int) -> int:
    """The first position at or after `start` where the tokens `part` stand within ``text[:end]``; -1 if nowhere."""
    at = text.find(part, start * WIDTH, end * WIDTH)
    while at % WIDTH and at >= 0:
        at = text.find(part, at + 1, end * WIDTH)
    return at // WIDTH
