"""The ends of the files that a run writes, as far as the daemon does not have them yet.

A report is small. What does not fit into one comes with the next, and of a file that is far ahead only the end comes.

Invariant: whatever a run has written, what is returned can be sent. What cannot is left out and counted, so that one
odd line costs itself alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ajet_sdk.bodies import check_storable
from ajet_sdk.errors import BadRequest
from ajet_sdk.runs import line_digest
from ajet_trainer.run_folder import read_json

MOST = 1 << 17
"""Bytes of a file in one report."""
TAIL = 1 << 20
"""Bytes of metrics that are looked at: those at the end."""
MAX_LINE = 4096
_AROUND = 8
"""Levels of nesting that a report has around a line."""


def log_after(path: Path, place: int, clean: Callable[[str], str]) -> dict[str, Any] | None:
    """The whole lines behind `place`, a number of bytes; None if there are none. A file that is shorter begins anew."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = 0 if place > size else place
            skip = size - start > TAIL
            start = size - TAIL if skip else start
            file.seek(start)
            data = file.read(MOST)
    except OSError:
        return None
    if skip:
        start, data = start + data.find(b"\n") + 1, data[data.find(b"\n") + 1 :]
    data = data[: data.rfind(b"\n") + 1] or (data if len(data) == MOST else b"")
    if not data:
        return None
    lines = [clean(line)[:MAX_LINE] for line in data.decode(errors="replace").splitlines()]
    return {"after": place, "start": start, "end": start + len(data), "lines": lines}


def metrics_after(
    path: Path, have: Mapping[str, Any], clean: Callable[[Any], Any] = lambda value: value
) -> tuple[list[dict[str, Any]], int, int]:
    """The lines of `metrics.jsonl` that the daemon lacks, each as `clean` shows it; the step behind which it should
    forget what it has; and how many of those lines are left out. Where its newest line is not in the file, the run went
    back to a checkpoint: it forgets all, and all are given again."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            data = file.read()
    except OSError:
        return [], -1, 0
    lines = data[: data.rfind(b"\n") + 1].splitlines()[1 if size > TAIL else 0 :]
    found, same, odd = list[dict[str, Any]](), False, 0
    for line in reversed(lines):  # most often the last one is what it has
        if (item := _object(line)) is None:
            odd += 1
            continue
        found.append(clean(item))
        if same := line_digest(json.dumps(found[-1])) == have.get("line"):
            break
    newer = [item for item in reversed(found) if item["step"] > have.get("step", -1) or not same]
    last = int(found[0]["step"]) if same else -1
    out, room = list[dict[str, Any]](), MOST
    for item in newer:
        size = len(json.dumps(item))
        if size > room and out:
            break
        if size <= room:
            out.append(item)
            room -= size
        else:  # it fits into no report
            odd += 1
    return out, last, odd


def last_line(path: Path, start: int = 0) -> str:
    """The last line that says anything, behind `start`."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - MOST))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def phase_in(path: Path) -> tuple[dict[str, Any], bool]:
    """The content of `phase.json`, and whether all of it can be shown. What cannot is left out."""
    found = read_json(path)
    out = {name: value for name, value in found.items() if type(value) is _PHASE.get(name) and _fits(value)}
    return out, all(name in out or found[name] is None for name in _PHASE if name in found)


_PHASE = {"phase": str, "step": int, "of": int, "config": str, "refused": str}


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int and _fits(found) else None


def _fits(value: Any) -> bool:
    """True if a report can carry `value`."""
    try:
        check_storable(value, "", _AROUND)
    except BadRequest:
        return False
    return True
