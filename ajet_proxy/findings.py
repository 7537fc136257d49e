"""The results of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass
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
