"""The sources of a reward: what a function returned, a program's exit code, its output, its file, or its grader.

Numbers are read alike everywhere. A program's output has many, so there a line counts only if it is a number. So it is
with a grader that failed, since what it printed last is rarely its verdict.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from ajet_sdk.rewards.decision import Earns, Ended, Fails, Said, Source
from ajet_sdk.rewards.numbers import LastNumber, finite, read

PRINTED, WRITTEN = "no line of its output is a number", "no line of the file that AJET_REWARD_FILE names is a number"
ONLY = "only successes are trained"
SHOWN = 80


def returned(value: Any) -> Earns:
    """The number that a function returned, and the note beside it if it returned a pair."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return Earns(finite(value[0]), value[1])
    return Earns(finite(value))


def exit_code(ended: Ended) -> Earns:
    """1.0 for success, else 0.0."""
    return Earns(1.0 if ended.code == 0 else 0.0)


def unless_given(ended: Ended) -> Earns:
    """The same, if nothing was given."""
    return replace(exit_code(ended), fallback=True)


def printed(ended: Ended) -> Said:
    """The last line of the program's output that is a number."""
    return _line(ended.printed, ended.code, PRINTED)


def written(ended: Ended) -> Said:
    """The last line of the program's file that is a number."""
    return _line(read(ended.written), ended.code, WRITTEN)


def graded(ended: Ended) -> Said:
    """The verdict of a command that ran after the program."""
    found, code = ended.verdict, ended.graded
    value = found.named if code == 0 else found.value
    if value is not None:
        return Earns(value)
    if code == 0:
        hint = (
            "the reward command printed no number, so its episode is not trained. If that is how it says that the "
            f"work is wrong, {ONLY}: have it print 0 then"
        )
        lacking = "the reward command must print a number alone, or as in 'score: 0.5'"
        return Fails(f"{lacking}{_last(found)}", hint=hint)
    failed = f"the reward command failed ({describe(code)}) without a line that is a number"
    hint = (
        f"{failed}, so its episode is not trained, but played again. If that is how it says that the work is "
        f"wrong, {ONLY}: add || echo 0"
    )
    return Fails(f"{failed}{_last(found)}", world=True, hint=hint)


NAMED: dict[str | None, tuple[Source, str]] = {
    None: (unless_given, "what the program gives itself, else exit-code"),
    "exit-code": (exit_code, "1.0 for 0, else 0.0"),
    "stdout": (printed, "the last line that is a number"),
    "file": (written, "the same, in the file that AJET_REWARD_FILE names"),
}
"""The sources, each with a description, by the names under which a program's user asks for them."""


def _line(found: LastNumber, code: int | None, lacking: str) -> Said:
    """The last line that is a number, of a program that ended with `code`. `lacking` says that there is none."""
    if found.value is not None:
        return Earns(found.value)
    hint = (
        f"a program that ended with {describe(code)} gave no number, so its episode is not trained. If that is how it "
        f"fails at its task, {ONLY}: have it give 0 then"
    )
    return Fails(f"{lacking} ({describe(code)}){_last(found)}", hint=hint)


def _last(found: LastNumber) -> str:
    return f"; its last line is {found.last[:SHOWN]!r}" if found.last else ""


def describe(code: int | None) -> str:
    """An exit code in words: ``exit code 3``, ``killed by SIGSEGV``."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
