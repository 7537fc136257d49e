"""Runs that are started from afar: the form of their configuration, what of it changes while they run, what it becomes.

It has the tables of the trainer's file, as JSON: ``{"trainer": {"groups": 4}, "verl": {"a.b": 1}}``. Everybody who
looks at it makes it `flat` first, so that one key has one spelling: ``verl.a.b``, however it was nested. A spelling
that another reader may take for another key (brackets, quotes, a sign in front) is refused.

Invariant: a flat configuration holds plain values alone: numbers, words, truth values, and lists of these.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ajet_sdk.bodies import check_storable
from ajet_sdk.errors import BadRequest
from ajet_sdk.settings import toml

MIX = "mix"
TABLES = ("trainer", "verl", MIX)
"""The tables of the trainer's file."""
LEARNING_RATE = "actor_rollout_ref.actor.optim.lr"
LIVE = (
    "trainer.groups", "trainer.total_steps", "trainer.save_freq", "trainer.max_staleness", f"verl.{LEARNING_RATE}",
)  # fmt: skip
"""Keys that a run takes up at its next step, as it does with the shares of lanes. All others take a restart."""
MAX_CONFIG = 65536
"""Characters of a configuration as JSON."""
_KEY = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_LANE = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9 ._:@+-]*[A-Za-z0-9_])?")


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as one table of dotted names, or `BadRequest` that names the key at fault. A null stays: it takes a key
    away (see `merged`)."""
    check_storable(config, "config")
    if len(json.dumps(config)) > MAX_CONFIG:
        raise BadRequest(f"config must have at most {MAX_CONFIG} characters", param="config")
    found: dict[str, Any] = {}
    for table, content in config.items():
        if table not in TABLES:
            raise BadRequest(f"unknown table {table[:80]!r}; known: {', '.join(TABLES)}", param=table[:80])
        if not isinstance(content, Mapping):
            raise BadRequest(f"{table} must be a table", param=table)
        for key, value in _leaves(content, table):
            if key in found:
                raise BadRequest(f"{key} is said twice", param=key)
            found[key] = value
    for key in found:
        above = key.split(".")
        for end in range(2, len(above)):
            if (table := ".".join(above[:end])) in found:
                raise BadRequest(f"{table} is both a value and a table", param=table)
    return found


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}.{name}"
        if not (_LANE if prefix == MIX else _KEY).fullmatch(name):
            said = "a key has letters, digits and _ alone, in names that dots separate; a lane also has . : @ + -"
            raise BadRequest(f"{key[:200]!r} is no key: {said}", param=key[:200])
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        elif isinstance(value, Mapping) or not (_plain(value) or _list(value)):
            raise BadRequest(f"{key} must be a number, a string, true, false, or a list of these", param=key)
        else:
            yield key, value


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _list(value: Any) -> bool:
    return isinstance(value, Sequence) and all(item is not None and _plain(item) for item in value)


def tables(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A flat configuration as the tables of the file, those that are not empty."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in sorted(config.items()):
        table, _, name = key.partition(".")
        found.setdefault(table, {})[name] = value
    return found


def merged(before: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with the keys of `change`, both flat. A null takes its key away."""
    return {key: value for key, value in {**before, **change}.items() if value is not None}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys in which two flat configurations differ. True is no 1, and 1 is no 1.0."""
    missing = object()

    def compared(value: Any) -> Any:
        return value if value is missing else json.dumps(value)

    keys = sorted(before.keys() | after.keys())
    return [key for key in keys if compared(before.get(key, missing)) != compared(after.get(key, missing))]


def restarts(keys: Sequence[str]) -> list[str]:
    """The ones of the changed `keys` that take a restart."""
    return [key for key in keys if key not in LIVE and not key.startswith(f"{MIX}.")]


def literal(text: str) -> Any:
    """A word of a command line as a TOML value where it is one (``1e-5``, ``true``, ``[1, 2]``), else as a string."""
    try:
        return toml(f"x = {text.lower() if text in ('True', 'False') else text}")["x"]
    except (ValueError, RecursionError):
        return text


def line_digest(line: str) -> str:
    """A short digest of a line."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]
