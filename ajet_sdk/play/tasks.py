"""A data set in a file: one task a line, as JSON or as plain text.

A file whose name ends in ``.jsonl``, ``.ndjson`` or ``.json``, or whose first line begins with ``{``, has one JSON
object, text or integer on each line. Any other file has one text on each line. Blank lines are left out.

Idea: a line that cannot be used is never skipped. All of them are named, each with its number, and then nothing is
played.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.bodies import KEY_PREFIX, check_storable
from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import MAX_LABEL

MAX_FILE = 256 << 20
"""Bytes of a data set: it is held in memory."""
MAX_LINE = 100_000
"""Bytes of a line: no variable of a program's environment holds many more."""
JSON_NAMES = (".jsonl", ".ndjson", ".json")
_PART = re.compile(r"[^A-Za-z0-9._-]+")
_BEFORE = re.compile(rf"\A(?:{KEY_PREFIX}|[^A-Za-z0-9])+")
"""Characters with which no name of a play begins: `ajet_sdk.bodies.check_id`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A task of a data set: what it is called, and its line as JSON."""

    name: str
    json: str


class BrokenLines(BadRequest):
    """`faults` says of each line that cannot be used what is wrong with it."""

    def __init__(self, path: Path, faults: list[str], lines: int) -> None:
        super().__init__(f"{len(faults)} of {lines} lines of {path} cannot be used: nothing is played", param="tasks")
        self.faults = faults


def read_tasks(path: Path) -> tuple[Line, ...]:
    """The tasks in the file at `path`; `BrokenLines` if there are lines that cannot be used, `BadRequest` if there is
    no task or no such file."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise BadRequest(f"{path} has more than {MAX_FILE} bytes: split it", param="tasks")
        data = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}", param="tasks") from None
    numbered = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
    lines = [(number, line.strip()) for number, line in numbered if line.strip()]
    if not lines:
        raise BadRequest(f"{path} has no task", param="tasks")
    read = _json_line if path.suffix in JSON_NAMES or lines[0][1].startswith(b"{") else _text_line
    found, faults = list[Line](), list[str]()
    for number, line in lines:
        try:
            found.append(read(_text(line)))
        except (ValueError, RecursionError) as error:
            faults.append(f"{path}:{number}: {error}")
        except BadRequest as error:
            faults.append(f"{path}:{number}: {error.message}")
    if faults:
        raise BrokenLines(path, faults, len(lines))
    return tuple(found)


def _text(line: bytes) -> str:
    if len(line) > MAX_LINE:
        raise ValueError(f"it has {len(line)} bytes, and may have {MAX_LINE}")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (at byte {error.start})") from None


def _text_line(line: str) -> Line:
    if len(line) > MAX_LABEL:
        raise ValueError(f"a task as text may have {MAX_LABEL} characters, not {len(line)}: give it an id, as JSON")
    if "\0" in line:
        raise ValueError("it has a character 0, which no environment holds")
    return Line(line, json.dumps(line))


def _json_line(line: str) -> Line:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} (at character {error.pos})") from None
    check_storable(value, "a value")
    if (name := named(value) if isinstance(value, Mapping) else _as_name(value)) is not None:
        return Line(name, line)
    raise ValueError(f"it must be a JSON object, a text or an integer, not {line[:40]}")


def named(task: Mapping[str, Any]) -> str:
    """The name of a task that is an object: its ``task``, else its ``id``, else a digest of it. `ValueError` or
    `TypeError` for a digest of what is no JSON."""
    if (given := _as_name(task.get("task")) or _as_name(task.get("id"))) is not None:
        return given
    said = json.dumps(dict(task), sort_keys=True, allow_nan=False)
    return f"task-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _as_name(value: Any) -> str | None:
    """`value` as a task's name, if it can be one."""
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        return None
    name = str(value)
    return name if 1 <= len(name) <= MAX_LABEL and "\0" not in name else None


def digest(parts: Iterable[str]) -> str:
    """Twelve hexadecimal digits that stand for these texts, in this order."""
    made = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        made.update(b"%d:" % len(data) + data)
    return made.hexdigest()[:12]


def as_part(text: str, most: int) -> str:
    """`text` as part of a play's name: as it is, or if it cannot stand there, what of it can and a digest."""
    fit = _BEFORE.sub("", _PART.sub("-", text)).rstrip("-.")
    return text if fit == text and len(text) <= most else _BEFORE.sub("", f"{fit[: most - 9]}-{digest([text])[:8]}")
