"""A client's request: a JSON object that is changed field by field and otherwise stays as it was written.

**Its size.** A body comes in at the speed of memory. To make objects of its JSON costs ten times that, and twenty times
its room. Each message, item, part and call then costs some microseconds more. A few megabytes can hold a million of
them, while everybody else waits. So the number of messages is limited. For each message that it may have, a request may
have `EACH` fields, `EACH` objects and lists, `NAMES` names (keys of objects) and `VALUES` values. That leaves room for
a bias on every token of a vocabulary and for millions of token ids in prompts.

Signs in the text are counted, before there are any objects. Outside of strings each name has its colon, and each value
its comma or its bracket. Most requests have too few of these signs, wherever they stand. Only the others are taken
apart, piece by piece, and no further than to the limit. Arguments of tool calls are texts that hold JSON, which is read
later, so what they hold counts as well.

**Its fields** are read as the engine reads them: it takes ``"true"`` and ``1`` for true, and ``"2"`` and ``2.0`` for 2.
Otherwise fewer choices would be counted than come. What the engine cannot read it refuses; here such a value is None,
as if it had been left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ajet_proxy.core.identity.headers import is_text
from ajet_proxy.core.protocol.json_edits import load, with_fields
from ajet_sdk.errors import BadRequest, TooLarge
from ajet_sdk.limits import MAX_LABEL


class JsonBody:
    """A client's JSON body, decoded: its ``fields``, and the ``model`` that it asks for, which is empty if it names
    none, or nothing that can name one."""

    def __init__(self, body: bytes, most: int | None = None) -> None:
        """Raises `BadRequest` unless `body` is a JSON object in UTF-8, -16 or -32, which is what the engine reads.
        Raises `TooLarge` if it is larger than a request of `most` messages may be. What begins as an object and has too
        many signs is `TooLarge` before it is known whether it is JSON."""
        try:
            self._text = body.decode(json.detect_encoding(body), "surrogatepass")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="not_utf8") from None
        self._most = most
        self._made_of: Counts | None = None
        if most is not None and self._text.lstrip(" \t\n\r").startswith("{") and _may_be_over(self._text, most):
            self._made_of = count((self._text,), most)
        try:
            self.fields: dict[str, Any] = load(self._text, deep=None).values
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not a JSON object: {error}", code="not_json") from None
        if most is not None and len(self.fields) > EACH * most:
            raise too_large(f"the body has more than {EACH * most} fields")
        model = self.fields.get("model")
        self.model = model if isinstance(model, str) and len(model) <= MAX_LABEL and is_text(model) else ""

    def check_size(self, entries: str) -> None:
        """`TooLarge` also for too many messages or items, which `entries` lists, and for what the arguments of calls
        are made of."""
        text, most, made_of = self._text, self._most, self._made_of
        if most is None:
            return
        if isinstance(told := self.fields.get(entries), list) and len(told) > most:
            raise too_large(f"{entries} has {len(told)} entries, and may have {most}", entries)
        if made_of is None and (escaped := text.count("\\u00")) and _may_be_over(text, most, escaped):
            made_of = count((text,), most)
        if made_of is not None:
            count(_arguments(self.fields), most, made_of)

    def naming(self, model: str | None) -> dict[str, str]:
        """The field, as JSON text, that makes this a request for `model`; none if it is one, or if `model` is None."""
        return {} if model is None or model == self.model else {"model": json.dumps(model)}

    def with_fields(self, fields: dict[str, str]) -> bytes:
        """The body, in UTF-8, with `fields` (name to JSON text) set and all else as it was written."""
        return with_fields(self._text, self.fields, fields).encode("utf-8", "surrogatepass")


# --- its size

EACH = 5
"""So many objects and lists, and fields of its own, a request may have for each message that it may have."""
NAMES = 30
"""So many names."""
VALUES = 200
"""So many values: entries of lists, and what stands under names."""
_OPEN = "[{"
PIECE = 1 << 20
"""Characters that are looked at together."""
Counts = tuple[int, int, int, int]
"""Of objects and lists, names, values, and the quotes around texts."""


def too_large(what: str, param: str | None = None) -> TooLarge:
    """The error for a request that has too much of something; `what` says of what."""
    return TooLarge(f"the request is too large to be read: {what}", code="too_many_messages", param=param)


def _may_be_over(text: str, most: int, escaped: int = 0) -> bool:
    """Tell whether `text` has enough signs to be over a limit, if `escaped` more of them are written as escapes."""
    opened = sum(map(text.count, _OPEN)) + escaped
    return opened > EACH * most or text.count(":") + escaped > NAMES * most or text.count(",") + opened > VALUES * most


def count(texts: Iterable[str], most: int, counted: Counts = (0, 0, 0, 0)) -> Counts:
    """Count what the JSON `texts` are made of, added to what is `counted` already; `TooLarge` if it is over a limit.
    Each string is a name, a value or a whole text, such as arguments. So what is within the other limits has at most
    two quotes for each of these. What is no JSON may have any number, and each costs time."""
    opened, names, values, quotes = counted
    for piece, quoted in (piece for text in texts for piece in bare(text)):
        inner = sum(map(piece.count, _OPEN))
        opened, names, values = opened + inner, names + piece.count(":"), values + inner + piece.count(",")
        quotes += quoted
        for found, limit, what in (
            (opened, EACH, "objects and lists"), (names, NAMES, "names"), (values, VALUES, "values"),
            (quotes, 2 * (EACH + NAMES + VALUES), "quotes"),
        ):
            if found > limit * most:
                raise too_large(f"the body holds more than {limit * most} {what}")
    return opened, names, values, quotes


def bare(text: str) -> Iterator[tuple[str, int]]:
    """`text` without its strings, piece by piece, each with the number of quotes in it that begin or end a string."""
    escape, inside = "", 0
    for at in range(0, len(text), PIECE):
        piece = (escape + text[at : at + PIECE]).replace("\\\\", "")
        escape = "\\" if piece.endswith("\\") else ""  # it goes on in the next piece
        parts = piece.replace('\\"', "").split('"')
        yield "".join(parts[inside::2]), len(parts) - 1
        inside = (inside + len(parts) - 1) % 2


def _arguments(fields: Mapping[str, Any]) -> Iterator[str]:
    """The arguments of all calls."""
    rest: list[Any] = [fields]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            if isinstance(written := one.get("arguments"), str):
                yield written
            one = one.values()
        rest += (inner for inner in one if isinstance(inner, dict | list))


# --- its fields

_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("0", "off", "f", "false", "n", "no")
_INTEGER = re.compile(r"([+-]?\d+(?:_\d+)*)(?:\.0*)?", re.ASCII).fullmatch


def flag(request: Mapping[str, Any], name: str) -> bool | None:
    """The truth value `name`; None if it is left out, null or unreadable."""
    value = request.get(name)
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def unread(request: Mapping[str, Any], name: str) -> bool:
    """Tell whether the truth value `name` is there and cannot be read, so that the engine must see it and refuse it."""
    return request.get(name) is not None and flag(request, name) is None


def integer(request: Mapping[str, Any], name: str) -> int | None:
    """The whole number `name`; None if it is left out, null or unreadable."""
    value = request.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        found = _INTEGER(value.strip()) if len(value) < 100 else None
        return int(found[1]) if found else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else None
    return int(value) if isinstance(value, int) else None


def number(request: Mapping[str, Any], name: str) -> float | None:
    """The number `name`; None if it is left out, null, unreadable or not finite."""
    value = request.get(name)
    if not isinstance(value, int | float | str) or (isinstance(value, str) and len(value) >= 100):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def choices_of(request: Mapping[str, Any]) -> int:
    """``n``; one if it is left out or if the engine will refuse it."""
    return max(1, integer(request, "n") or 1)

TEXTS: Collection[str] = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
"""The types of parts that every route takes for text."""


def beyond_text(entries: Any, *names: str, texts: Collection[str] = TEXTS) -> bool:
    """Tell whether a message or item in the list `entries` holds more than text, such as an image or a sound, under one
    of `names`. Ids do not tell such things: they hold a placeholder, and a sample would teach an answer to something
    that is not there. Parts of the types `texts` are text, and what is not known to be text is taken to be more. vLLM
    finds an image also by its key alone, if the part has no type, and by its ``uuid``."""
    if not isinstance(entries, list):
        return False
    contents = [entry.get(name) for entry in entries if isinstance(entry, dict) for name in names]
    return not all(_is_text(part, texts) for content in contents if isinstance(content, list) for part in content)


def _is_text(part: Any, texts: Collection[str]) -> bool:
    if not isinstance(part, dict) or part.keys() == {"text"}:
        return True
    return part.get("type") in texts and part.get("uuid") is None
