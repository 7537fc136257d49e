"""Decides if an episode counts, and what it earns: from what was given, how it ended, and what went unanswered.

The rule: a failure of the world is never trained as the policy's, and a reward that somebody gave stands. What the
episode would have earned decides nothing: else successes would be kept, failures played again, and every mean too high.
So no decision here reads a reward's value. It hands the value on, or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ajet_sdk.rewards.blame import of_the_world, reason_of
from ajet_sdk.rewards.numbers import LastNumber

TEMPORARY = 75
"""The exit code of a program that the world failed: ``EX_TEMPFAIL`` of sysexits.h."""
FULL = 69
"""The exit code of a program for which the world had no place: ``EX_UNAVAILABLE``. That is no attempt."""
WORLD_ENDS = ("client_gone",)
"""Reasons of the proxy to discard an episode that are nobody's failure who plays."""
UNREWARDED = "left without a reward"
SHOWN = 3
"""At most so many reasons are named."""


class Given(Enum):
    """A reward that was given to the episode before it is decided, by the agent itself, a header or anybody else."""

    NOTHING = "nothing"
    STEPS = "rewards that are not final"
    FINAL = "a final reward"
    END = "it was discarded: aborted, or by the proxy"


@dataclass(frozen=True, slots=True)
class Earns:
    """The episode gets this final reward, with its note. As a `fallback` it does only if nothing was given."""

    value: float
    note: str | None = None
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Stands:
    """The episode has what was given to it."""


@dataclass(frozen=True, slots=True)
class Fails:
    """The episode is given up, for a `reason` in words. It is played again if the `world` failed, as a grader may have.
    `hint` is what the user should know if that happens again and again."""

    reason: str
    world: bool = False
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an episode, as it was played.

    `record` is the proxy's, with its calls. A program ended with exit code `code`; what it `printed` and has `written`
    to its file are read for numbers, and so is the `verdict` of its grader, which ended with `graded`. A function, or
    whoever played otherwise, raised `error`, of which the classes `infra` are the world's.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None
    printed: LastNumber = field(default_factory=LastNumber)
    written: bytes = b""
    graded: int | None = None
    verdict: LastNumber = field(default_factory=LastNumber)
    error: BaseException | None = None
    infra: tuple[type[BaseException], ...] = ()

    @property
    def gave_up(self) -> Fails | None:
        """The agent's own word that it did not come to its end, if it gave one."""
        if self.error is not None:
            return Fails(reason_of(self.error), of_the_world(self.error, self.infra))
        return Fails(f"exit code {TEMPORARY}", world=True) if TEMPORARY in (self.code, self.graded) else None


Said = Earns | Fails
Source = Callable[[Ended], Said]
"""Where a reward comes from. It is asked once for each episode that came to its end, and says what that earns, or why
that is no number."""


def decided(
    source: Source | None, ended: Ended, failed: str | None = None, *, judged: bool = False
) -> Earns | Stands | Fails:
    """Decides what becomes of an episode that ended so. Without a `source` it has the rewards that were given. `failed`
    says in words how its program failed, and `judged` that a judge rewards it later."""
    unanswered, gave_up = unanswered_in(ended.record), ended.gave_up
    if unanswered is not None and failed is not None and gave_up is None:
        unanswered = f"{failed}; {unanswered}"
    said = None if source is None or gave_up is not None else source(ended)
    return decide(given_to(ended.record), unanswered, gave_up, said, judged=judged)


def decide(
    given: Given, unanswered: str | None, gave_up: Fails | None = None, said: Said | None = None, *,
    judged: bool = False,
) -> Earns | Stands | Fails:
    """Decides what becomes of an episode.

    `unanswered` says in words which attempts at the model were lost to the world. `said` is what the source of its
    reward says; None, if it has no source besides what was `given`. One that is to be `judged` needs none.
    """
    if isinstance(said, Earns) and said.fallback and given is not Given.NOTHING:
        said = None
    world = [gave_up.reason] if gave_up is not None and (gave_up.world or unanswered) else []
    world += [said.reason] if isinstance(said, Fails) and said.world else []
    world += [unanswered] if unanswered else []
    if given is Given.END or (given is Given.FINAL and (world or not isinstance(said, Earns))):
        return Stands()
    if given is Given.STEPS and gave_up is None and said is None:
        return Stands()
    if world:
        return Fails("; ".join(world), world=True, hint=said.hint if isinstance(said, Fails) else None)
    if gave_up is None and said is None and judged:
        return Stands()
    return gave_up or said or Fails(UNREWARDED)


def given_to(record: Mapping[str, Any]) -> Given:
    """Reads what was given to the episode with this record."""
    if record.get("state") == "open":
        finals = {bool(one.get("final")) for one in record.get("rewards") or ()}
        return Given.FINAL if True in finals else Given.STEPS if finals else Given.NOTHING
    return Given.END if record.get("state") == "discarded" else Given.FINAL


def unanswered_in(record: Mapping[str, Any]) -> str | None:
    """The attempts at the model that were lost to the world, in words; None if there are none."""
    said = ((one.get("reason"), one.get("detail")) for one in record.get("unanswered") or ())
    reasons = list(dict.fromkeys(f"{reason}: {detail}" if detail else str(reason) for reason, detail in said))
    more = " and others" if len(reasons) > SHOWN else ""
    return f"the model never answered ({', '.join(reasons[:SHOWN])}{more})" if reasons else None


def lost_to_the_world(record: Mapping[str, Any]) -> bool:
    """True if it is the world's failure that the episode with this record was discarded."""
    if record.get("reason") == "aborted":
        return record.get("cause") == "infra"
    return record.get("reason") in WORLD_ENDS or bool(record.get("unanswered"))
