"""JSON objects with the place of each value in the text, so that one value can be exchanged and all else stays.

Re-serialising would change how numbers, escapes and spaces are written. Here the text is decoded by the standard
library's scanner, value by value, and `splice` puts new text in place of old. Invariant: outside the exchanged values
the text stays the same, character for character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

_quoted = lru_cache(json.dumps)
_scan_value = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\n\r]*").match
_plain_name = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*').match
_after_value = re.compile(r"[ \t\n\r]*([,}])").match


# Patterns of JSON in bytes, as vLLM writes it: each matches JSON in that form and nothing else. They backtrack nowhere
# (possessive quantifiers), so a hostile text costs no more than its length.
STRING = rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
NUMBER = rb"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?"
WHOLE = rb"(?:0|[1-9]\d*+)"
INDEX = rb"(?:0|[1-9]\d{0,5})"
ID = rb"(?:0|[1-9]\d{0,9})"
IDS = rb"\[" + ID + rb"(?:," + ID + rb")*+\]"

Edits = dict[tuple[int, int], str]
"""New text for spans of an old one."""


class Spanned(NamedTuple):
    """A decoded object: its values, where each of them stands in the text, and where the closing brace stands."""

    values: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    end: int


def scan(text: str, *, deep: str | None = None) -> Spanned:
    """The one object that `text` holds. A list under the key `deep` becomes a list of `Spanned`.

    Raises ValueError if `text` is anything else, RecursionError if it is nested too deeply.
    """
    found = scan_at(text, _skip(text, 0), deep)
    if _skip(text, found.end + 1) != len(text):
        raise ValueError("text after the end of the object")
    return found


def load(text: str, *, deep: str | None) -> Spanned:
    """`scan` for callers that exchange nothing: without any span, at a fifth of the cost."""
    found = _unplaced(json.loads(text))
    if deep is not None and isinstance(items := found.values.get(deep), list):
        found.values[deep] = [_unplaced(item) for item in items]
    return found


def _unplaced(values: Any) -> Spanned:
    if not isinstance(values, dict):
        raise ValueError("expected an object")
    return Spanned(values, {}, -1)


def splice(text: str, edits: Edits) -> str:
    """`text` with each span replaced; spans do not overlap."""
    parts: list[str] = []
    at = 0
    for (start, end), value in sorted(edits.items()):
        parts += (text[at:start], value)
        at = end
    parts.append(text[at:])
    return "".join(parts)


def with_fields(text: str, values: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """The object `text`, which holds `values`, with top-level `fields` (name to JSON text) set: in place where they
    stand, else at the end. Where they stand is looked for only if one of them is there."""
    there = [name for name in fields if name in values]
    if there:
        spans = scan(text).spans
        text = splice(text, {spans[name]: fields[name] for name in there})
    if len(there) == len(fields):
        return text
    added = ",".join([f"{_quoted(name)}:{value}" for name, value in fields.items() if name not in values])
    end = text.rindex("}")
    return f"{text[:end]}{',' if values else ''}{added}{text[end:]}"


def _skip(text: str, at: int) -> int:
    found = _space(text, at)
    assert found is not None  # the pattern matches the empty string
    return found.end()


def scan_at(text: str, at: int, deep: str | None = None) -> Spanned:
    """The object that begins at character `at`, whatever follows it; otherwise as `scan`."""
    if not text.startswith("{", at):
        raise ValueError(f"expected an object at character {at}")
    values: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    at = _skip(text, at + 1)
    if text.startswith("}", at):
        return Spanned(values, spans, at)
    while True:
        name, start = _name(text, at)
        if name == deep and text.startswith("[", start):
            values[name], at = scan_list(text, start)
        else:
            values[name], at = _scan_value(text, start)
        spans[name] = (start, at)
        after = _after_value(text, at)
        if after is None:
            raise ValueError(f"expected ',' or '}}' after character {at}")
        at = after.end()
        if after[1] == "}":
            return Spanned(values, spans, at - 1)


def _name(text: str, at: int) -> tuple[str, int]:
    """The name of the next member, and where its value begins."""
    if plain := _plain_name(text, at):
        return plain[1], plain.end()
    at = _skip(text, at)
    if not text.startswith('"', at):
        raise ValueError(f"expected a name at character {at}")
    name, at = _scan_value(text, at)
    at = _skip(text, at)
    if not text.startswith(":", at):
        raise ValueError(f"expected ':' at character {at}")
    return name, _skip(text, at + 1)


def scan_list(text: str, at: int) -> tuple[list[Spanned], int]:
    """The objects of the list that begins at character `at`, and where the text goes on after it; raises like `scan`.
    """
    items: list[Spanned] = []
    at = _skip(text, at + 1)
    if text.startswith("]", at):
        return items, at + 1
    while True:
        items.append(scan_at(text, at))
        at = _skip(text, items[-1].end + 1)
        if text.startswith("]", at):
            return items, at + 1
        if not text.startswith(",", at):
            raise ValueError(f"expected ',' or ']' at character {at}")
        at = _skip(text, at + 1)


def is_utf8(raw: bytes) -> bool:
    """Tell whether `raw` is UTF-8, which no pattern of bytes can tell."""
    if raw.isascii():
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
