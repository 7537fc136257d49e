"""The findings of a doctor, each with what to do about it.

A warning is something that works but will surprise; a fault is something that does not work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. ``advice`` says what to do; it is empty when there is nothing to do."""

    level: Literal["ok", "warning", "fault"]
    check: str
    message: str
    advice: str = ""


ok, warning, fault = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "fault")


def show(findings: Sequence[Finding], *, json: bool) -> None:
    """Prints them, and ends the process with 1 if there is a fault."""
    sys.stdout.write(f"{as_json(findings) if json else as_text(findings)}\n")
    if any(finding.level == "fault" for finding in findings):
        sys.exit(1)


def as_text(findings: Iterable[Finding]) -> str:
    """One line a finding, with its advice below it."""
    lines = []
    for item in findings:
        lines.append(f"{item.level:8}{item.check}: {' '.join(item.message.split())}")
        if item.advice:
            lines.append(f"        → {item.advice}")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"ok": all(f.level != "fault" for f in findings), "findings": [asdict(f) for f in findings]})
