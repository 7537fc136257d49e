"""What one choice said, put together from the pieces in which the engine told it.

A piece is the object that held the words (``delta`` or ``message`` of a chat, ``{"text": …}`` of a completion), or the
raw bytes of its one member, which is how the fast way through a stream keeps it. Texts of one name follow one another,
and so do the arguments of one tool call, as clients of such a stream put them together. The result is what a client
that keeps history sends back: the assistant's message, or the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Piece = bytes | Mapping[str, Any]


def joined(pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """The whole of `pieces`; None if they are not what clients could put together."""
    whole: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    try:
        for piece in _decoded(pieces):
            for name, value in piece.items():
                if name == "tool_calls":
                    _call(calls, value or ())
                elif isinstance(value, str) and name != "role":
                    whole[name] = whole.get(name, "") + value
                elif value is not None:
                    whole[name] = value
        return whole | ({"tool_calls": [calls[place] for place in sorted(calls)]} if calls else {})
    except (ValueError, TypeError, AttributeError):
        return None


def _decoded(pieces: Sequence[Piece]) -> Iterator[Mapping[str, Any]]:
    for raw, run in groupby(pieces, lambda piece: isinstance(piece, bytes)):
        if raw:
            members: list[Any] = list(run)
            yield from json.loads(b"[{%b}]" % b"},{".join(members))
        else:
            yield from run  # type: ignore[misc]


def _call(calls: dict[int, dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Add `pieces` of tool calls to `calls`; a piece without an index is the next call whole."""
    for piece in pieces:
        call = calls.setdefault(piece.get("index", len(calls)), {})
        for name, value in piece.items():
            if name == "function":
                function = call.setdefault(name, {})
                for part, text in value.items():
                    function[part] = function.get(part, "") + (text or "")
            elif name != "index" and value is not None:
                call.setdefault(name, value)
