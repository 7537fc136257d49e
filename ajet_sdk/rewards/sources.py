"""What each source of a program's reward says: its exit code, its output, a file, or the command that grades it.

Numbers are read alike everywhere. A program's output has many, so there a line counts only if it is a number. So it is
with a grader that failed, since what it printed last is rarely its verdict.
"""

from __future__ import annotations

import signal

from ajet_sdk.rewards.decision import GaveUp, NoNumber, Number, Said
from ajet_sdk.rewards.numbers import LastNumber

TEMPORARY = 75
"""The exit code of a program that the world failed: ``EX_TEMPFAIL`` of sysexits.h."""
PRINTED, WRITTEN = "no line of its output is a number", "no line of the file that AJET_REWARD_FILE names is a number"
ONLY = "only successes are trained"
SHOWN = 80


def gave_up(*codes: int) -> GaveUp | None:
    """What the exit codes of a program and its grader say of the world, if they do."""
    return GaveUp(describe(TEMPORARY), world=True) if TEMPORARY in codes else None


def exit_code(code: int, *, asked: bool) -> Said:
    """1.0 for success, else 0.0. Unless it was `asked` for, it counts only if nothing was given."""
    return Number(1.0 if code == 0 else 0.0, fallback=not asked)


def lines(read: LastNumber, code: int, lacking: str) -> Said:
    """The last line that is a number, of a program that ended with `code`. `lacking` says that there is none."""
    if read.value is not None:
        return Number(read.value)
    hint = (
        f"a program that ended with {describe(code)} gave no number, so its episode is not trained. If that is how it "
        f"fails at its task, {ONLY}: have it give 0 then"
    )
    return NoNumber(f"{lacking} ({describe(code)}){_last(read)}", hint=hint)


def grader(read: LastNumber, code: int) -> Said:
    """What a grader printed that ended with `code`."""
    value = read.named if code == 0 else read.value
    if value is not None:
        return Number(value)
    if code == 0:
        hint = (
            "the reward command printed no number, so its episode is not trained. If that is how it says that the work "
            f"is wrong, {ONLY}: have it print 0 then"
        )
        told = f"the reward command must print a number alone, or as in 'score: 0.5'{_last(read)}"
        return NoNumber(told, hint=hint)
    failed = f"the reward command failed ({describe(code)}) without a line that is a number"
    hint = (
        f"{failed}, so its episode is not trained, but played again. If that is how it says that the work is wrong, "
        f"{ONLY}: add || echo 0"
    )
    return NoNumber(f"{failed}{_last(read)}", grader=True, hint=hint)


def _last(read: LastNumber) -> str:
    return f"; its last line is {read.last[:SHOWN]!r}" if read.last else ""


def describe(code: int) -> str:
    """An exit code in words: ``exit code 3``, ``killed by SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
