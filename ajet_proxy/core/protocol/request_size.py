"""How many things a request is made of: what bounds the work on it, which is done while everybody else waits.

A body comes in at the speed of memory. To make objects of its JSON costs ten times that and twenty times its size, and
what is then asked of each message, item, part and call (whose history is it, is it what was sampled) some microseconds
each; a few megabytes can hold a million of them. So a request may have only so many messages, fields, objects and
lists, names (keys of objects) and values, whatever it is that they say: `EACH`, `NAMES` and `VALUES` for each message
that it may have. They leave room for a bias on every token of a vocabulary and for millions of token ids in prompts.

Text is counted, not objects, and before there are any: outside of strings each name has its colon and each value its
comma or its bracket. Most requests have too few of these signs, wherever they stand; only what is left is taken apart,
piece by piece, and no further than to the limit. Arguments of tool calls are texts that hold JSON, which is read later,
and what they hold counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ajet_sdk.errors import TooLarge

EACH = 5
"""So many objects and lists, and fields of its own, a request may have for each message that it may have."""
NAMES = 30
"""So many names."""
VALUES = 200
"""So many values: entries of lists, and what stands under names."""
_LISTS = ("messages", "input")
_OPEN = "[{"
_PIECE = 1 << 20
"""Characters that are looked at together."""
Counts = tuple[int, int, int, int]
"""Of objects and lists, names, values, and the quotes around texts."""


def check_text(text: str, most: int) -> Counts | None:
    """What the JSON object `text` is made of, None if it has too few signs to be counted; `TooLarge` if that is more
    than a request may be that may have `most` messages."""
    return _count((text,), most) if _may_be_over(text, most) else None


def check(text: str, fields: Mapping[str, Any], most: int, made_of: Counts | None = None) -> None:
    """`TooLarge` if the request `text`, which says `fields`, has more than `most` messages or items, or more with the
    arguments of its calls than it may. `made_of` is what `check_text` found."""
    for name in _LISTS:
        if isinstance(told := fields.get(name), list) and len(told) > most:
            raise too_large(f"{name} has {len(told)} entries, and may have {most}", name)
    if made_of is None and _may_be_over(text, most, text.count("\\u00")):
        made_of = _count((text,), most)
    if made_of is not None:
        _count(_arguments(fields), most, made_of)


def too_large(what: str, param: str | None = None) -> TooLarge:
    """The error that says `what` there is too much of."""
    return TooLarge(f"the request is too large to be read: {what}", code="too_many_messages", param=param)


def _may_be_over(text: str, most: int, escaped: int = 0) -> bool:
    """Whether `text` has as many signs as it takes to be over a limit; so many more may be `escaped`."""
    opened = sum(map(text.count, _OPEN)) + escaped
    return opened > EACH * most or text.count(":") + escaped > NAMES * most or text.count(",") + opened > VALUES * most


def _count(texts: Iterable[str], most: int, counted: Counts = (0, 0, 0, 0)) -> Counts:
    """What the JSON `texts` and what is `counted` already are made of together; `TooLarge` if it is over a limit. Each
    string is a name, a value or a whole text, as arguments may be, so what is within the other limits has at most two
    quotes for each of these. What is no JSON may have any number, and each costs time."""
    opened, names, values, quotes = counted
    for piece, quoted in (piece for text in texts for piece in _bare(text)):
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


def _bare(text: str) -> Iterator[tuple[str, int]]:
    """`text` without its strings, piece by piece, and how many quotes begin or end one in each piece."""
    escape, inside = "", 0
    for at in range(0, len(text), _PIECE):
        piece = (escape + text[at : at + _PIECE]).replace("\\\\", "")
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
