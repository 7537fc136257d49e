"""The number in what a program or a grader prints.

Idea: a number counts only if it can be nothing else. So a line counts that is a number, and the last such line decides.
In the output of a grader that succeeded a line counts too that ends in one after ``:`` or ``=``, as in ``score: 0.5``,
unless a later line has a digit and is no number. Words around a number say what it is of, and that is rarely the
reward.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import MAX_REWARD

_COLOR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_WORD = re.compile(r"(?!\w+://)\S*[^\W\d_]\S*")
_PLACE = re.compile(r"\S*[./]\S*")
"""Before a colon that touches both sides: a file, as in ``build.log:12``."""
_TIME = re.compile(r"\b\d{1,2}(:\d\d){1,2}\b")
_ANOTHER = re.compile(r"[:=]\s*[-+]?\.?\d")
"""A name in which a number stands after a sign is that of several, unless that is a time."""
OTHER_SIGNS = ":=!<>~"
"""Before the sign these make another one of it: ``==``."""


class LastNumber:
    """Reads lines and remembers the last that is a number; or, in `named`, also what a line ends in after a sign.

    `value` and `named` are None if there is no such line, or if the last one says what no reward can be (``nan``), or
    is a name that is not believed. `last` is the last line that is not blank.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.named: float | None = None
        self.last = ""
        self._goes_on = self._is_a_name = False

    def feed(self, data: bytes) -> None:
        """Reads a line, or a piece of a longer one, which is no number. A carriage return ends a line too."""
        inside, self._goes_on = self._goes_on, not data.endswith((b"\n", b"\r"))
        for line in data.splitlines() if not inside else ():
            text = _COLOR.sub("", line.decode("utf-8-sig", "replace")).strip()
            self.last = text or self.last
            alone = _float(text)
            found = alone if alone is not None else _behind_a_sign(text)
            if alone is not None:
                self.value = _usable(alone)
            if found is not None or (self._is_a_name and any(map(str.isdigit, text))):
                self.named = None if found is None else _usable(found)
                self._is_a_name = alone is None


def read(text: bytes) -> LastNumber:
    """Reads all lines of `text`."""
    reader = LastNumber()
    for line in text.splitlines(keepends=True):
        reader.feed(line)
    return reader


def _float(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _usable(value: float) -> float | None:
    return value if abs(value) <= MAX_REWARD else None


def _behind_a_sign(text: str) -> float | None:
    """The number that `text` ends in after its last ``:`` or ``=``. A time, a ratio, an address, a line of a
    file and a comparison are no name."""
    at = max(text.rfind(":"), text.rfind("="))
    name, number = text[: max(at, 0)], text[at + 1 :]
    if not name.strip() or name[-1] in OTHER_SIGNS or _float(name) is not None or _ANOTHER.search(_TIME.sub("", name)):
        return None
    if name[-1].isspace() or number[:1].isspace():
        return _float(number)
    word = name.split()[-1]
    is_place = text[at] == ":" and _PLACE.fullmatch(word)
    return _float(number) if _WORD.fullmatch(word) and not is_place else None


def finite(value: Any) -> float:
    """`value` (a number, or what converts to one, such as a numpy scalar or a bool) as a finite float."""
    try:
        number = float(value) if not isinstance(value, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        most = f"a finite number of at most {MAX_REWARD:g}"
        raise BadRequest(f"a reward must be {most}, not {repr(value)[:80]}", param="value")
    return number
