"""The forms of bodies, and of names and keys in them: a frozen dataclass whose fields say what they may hold, checked
wherever one is made.

What does not fit is a `BadRequest` that names the field. `parse` makes a body of decoded JSON, and refuses unknown
fields too, with the nearest known name, because a misspelt ``final`` must not silently seal an episode.

Invariant: a body can be written as UTF-8, strict JSON and MessagePack. It has no lone surrogates, no NaN or infinity,
no integer over 64 bits, no deep nesting. JSON itself allows all four, a journal does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Any, TypeVar

from ajet_sdk.errors import BadRequest

MAX_NESTING = 32
CUT = "(cut)"
KEY_PREFIX = "ajet-"
KEY = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{16,}}[A-Za-z0-9_.-]*")
"""The form of a key in any text."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}\Z")
_PART = re.compile(r"~[1-9][0-9]{0,11}\Z")
Check = Callable[[Any, str], Any]
B = TypeVar("B")


def number(least: float, most: float, default: Any = MISSING, *, above: bool = False) -> Any:
    """A field whose number is from `least` to `most`; with `above`, more than `least`."""
    return field(default=default, metadata={"bounds": (least, most, above)})


def text(least: int, most: int, default: Any = MISSING) -> Any:
    """A field of `least` to `most` characters."""
    return field(default=default, metadata={"length": (least, most)})


def word(words: Sequence[str], default: Any = MISSING) -> Any:
    """A field with one of `words`."""
    return field(default=default, metadata={"words": words})


def checked(check: Check, default: Any = MISSING) -> Any:
    """A field that `check` looks at, which is given the value and the field's name."""
    return field(default=default, metadata={"check": check})


def cut(words: str, most: int) -> str:
    """`words` as UTF-8 can hold them. Of more than `most` characters the end is left out, and `CUT` stands there."""
    words = words.encode("utf-8", "replace").decode()
    return words if len(words) <= most else words[: max(0, most - len(CUT))] + CUT


def check_id(value: str, name: str = "episode") -> str:
    """`value` if it can name an episode (1 to 200 of ``A-Z a-z 0-9 . _ : @ -``, not starting like a key)."""
    if not _ID.match(value) or value.startswith(KEY_PREFIX):
        raise BadRequest(
            f"{name} must be 1 to 200 letters, digits or . _ : @ - and may not begin with {KEY_PREFIX!r}", param=name
        )
    return value


def check_episode(value: str, name: str = "episode") -> str:
    """`value` if an episode can be called so: by `check_id`, or as the proxy calls a later part of it, ``NAME~2``."""
    check_id(_PART.sub("", value), name)
    return value


class Body:
    """A body that holds what its fields allow, or `BadRequest`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind, optional, rules in _fields(type(self)):  # type: ignore[arg-type]
            given = getattr(self, name)
            if given is None and optional:
                continue
            value = _coerce(name, kind, given)
            if value is not given:
                object.__setattr__(self, name, value)
            for rule, limits in rules:
                _RULES[rule](name, value, limits)


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, str, bool, tuple[tuple[str, Any], ...]], ...]:
    """Each field of a body: its name, its type, whether it may be None, and its rules with what they allow."""
    return tuple(
        (one.name, str(one.type).removesuffix(" | None"), str(one.type).endswith(" | None"),
         tuple(one.metadata.items()))
        for one in fields(kind)
    )  # fmt: skip


def _within(name: str, value: float, bounds: tuple[float, float, bool]) -> None:
    least, most, above = bounds
    if not least <= value <= most or (above and value == least):
        said = f"above {least:g} and at most" if above else f"from {least:.15g} to"
        raise BadRequest(f"{name} must be a finite number {said} {most:.15g}", param=name)


def _among(name: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise BadRequest(f"{name} must be one of {', '.join(words)}, not {value[:80]!r}", param=name)


_RULES: Mapping[str, Callable[[str, Any, Any], object]] = {
    "bounds": _within, "length": lambda name, value, length: check_length(value, name, *length), "words": _among,
    "check": lambda name, value, check: check(value, name),
}


def check_length(value: str, name: str, least: int, most: int) -> None:
    """Raises `BadRequest` for a text that is too short or too long."""
    if not least <= len(value) <= most:
        raise BadRequest(f"{name} must have {least} to {most} characters", param=name)


def parse(kind: type[B], body: Any) -> B:
    """`body` (decoded JSON; None counts as ``{}``) as a `kind`, or a `BadRequest` naming the field at fault."""
    body = {} if body is None else body
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in body:
        if name not in known:
            import difflib

            shown = str(name)[:80]  # nobody means a known one by a longer name, and to compare it takes long
            near = difflib.get_close_matches(shown, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known) or 'none'}"
            raise BadRequest(f"unknown field {shown!r}{hint}", param=shown)
    for name, f in known.items():
        if name not in body and _required(f):
            raise BadRequest(f"missing field {name!r}", param=name)
    return kind(**body)


def to_json(body: Any) -> dict[str, Any]:
    """A body as the JSON object that `parse` reads back; fields at their default are left out."""
    out = {}
    for f in fields(body):
        value = getattr(body, f.name)
        if _required(f) or value != (f.default_factory() if callable(f.default_factory) else f.default):
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _coerce(name: str, base: str, value: Any) -> Any:
    """`value` checked against the type `base`; numbers must be finite."""
    check_storable(value, name)
    if base == "float" and type(value) in (int, float):
        return float(value)
    if base == "int" and type(value) is int:
        return value
    if base == "bool" and type(value) is bool:
        return value
    if base == "str" and isinstance(value, str):
        return value
    if base.startswith("Mapping") and isinstance(value, Mapping):
        if base == "Mapping[str, str]" and not all(isinstance(item, str) for item in value.values()):
            raise BadRequest(f"{name} must map strings to strings", param=name)
        if base == "Mapping[str, float]":
            return {key: _coerce(f"{name}.{key}", "float", item) for key, item in value.items()}
        return dict(value)
    if base == "tuple[str, ...]" and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if base.startswith("tuple[Mapping") and isinstance(value, (list, tuple)):
        return tuple(_coerce(name, "Mapping", item) for item in value)
    words = {"float": "a finite number", "int": "an integer", "bool": "true or false", "str": "a string",
             "tuple[str, ...]": "a list of strings", "tuple[Mapping[str, Any], ...]": "a list of objects"}
    raise BadRequest(f"{name} must be {words.get(base, 'an object')}, not {repr(value)[:80]}", param=name)


def check_storable(value: Any, name: str, depth: int = 0) -> None:
    """Refuses what cannot be written as JSON at all, or not as UTF-8, strict JSON and MessagePack."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number, not {value}", param=name)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadRequest(f"{name} must be a finite number of at most 64 bits", param=name)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{name} must be text that UTF-8 can hold, without lone surrogates", param=name) from None
    if depth > MAX_NESTING:
        raise BadRequest(f"{name} is nested more than {MAX_NESTING} deep", param=name)
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_storable(key, name, depth + 1)
            check_storable(item, name, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_storable(item, name, depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise BadRequest(f"{name} must be what JSON can say, not a {type(value).__name__}", param=name)
