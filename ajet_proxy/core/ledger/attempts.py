"""Which attempts of an episode's agents at the model went unanswered, because the world failed.

Idea: an attempt is one request, with all its choices. It is answered if its client got the answer. It also is if a
later request of that agent was answered that begins with the same messages (`core.conversation.said`). So what
an attempt came to is its own fate, not its place among the calls. `fate` says who failed. What the agent sent, or broke
off itself, is never listed. The list alone is read when a reward is decided (contract §5.4).

Requests that became no call are attempts too. So is the time in which the daemon was away: nobody knows who asked then.
If it is not known what such a request said, any later answer makes it good.

Invariant: an attempt has the number of its request, in the order in which they began. It is kept while it runs, or is
lost to the world. At most `MOST` lost ones are kept; further ones are counted, and stay unanswered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ajet_proxy.core.trajectory import call as reasons
from ajet_sdk.errors import SENT_BADLY

Fate = Literal["answered", "own", "world"]
MOST: Final = 1000
"""So many lost attempts of an episode are kept."""
SURE: Final = 2
"""By so many requests an attempt is answered for sure: not all of them will be taken back."""
HELD: Final = "held"
"""The client gave up while the request waited at the gate."""
UNSERVED: Final = "unserved"
"""The proxy itself had no answer but an error."""
AWAY: Final = "away"
"""The proxy was not running."""
MORE: Final = "more"
"""Stands for all attempts beyond the first `MOST`."""
WORLD: Final = (
    reasons.ENGINE_ERROR, reasons.ENGINE_ABORTED, reasons.TRUNCATED, reasons.RESTARTED, reasons.NOT_WRITTEN,
    reasons.ENGINE_SILENT, reasons.OTHER_WEIGHTS,
)  # fmt: skip
_NOT_SENT = (
    reasons.DISCONNECTED, reasons.STALLED, reasons.NOT_WRITTEN, reasons.ENGINE_SILENT, reasons.RESTARTED,
)  # fmt: skip
NOT_SENT: Final = {"complete": _NOT_SENT, "lost": (
    *_NOT_SENT, reasons.TRUNCATED, reasons.ENGINE_ERROR, reasons.ENGINE_ABORTED, reasons.CAPTURE_FAILED,
)}
"""Why a call is lost after all that had an answer for its client, complete or not: the client was not sent the end, or
what it was sent of an answer that is not captured is none."""
OWN: Final = (reasons.DISCONNECTED, reasons.STALLED, reasons.RETRIED)


def fate(reason: str, *, status: int = 0, told: bool = False) -> Fate:
    """Tell what became of an attempt one of whose calls is lost for `reason`: the client was answered although the call
    cannot be trained, or it or the world failed. `status` is the engine's if it refused; `told` says that the answer
    was whole, as far as the client can tell."""
    if reason == reasons.REFUSED:
        return "world" if status and status not in SENT_BADLY else "own"
    if reason == reasons.CAPTURE_FAILED:
        return "answered" if told else "world"
    if reason in WORLD:
        return "world"
    return "own" if reason in OWN or reason.startswith("episode_") else "answered"


@dataclass(slots=True)
class Attempt:
    """A request of an `agent` (None: nobody knows whose) that ``said`` this (`Said.key`; empty: unknown).
    ``number`` is that of its request, or of the latest one before it, if it became no call. ``running`` of
    its calls are in flight. Once it is lost to the world it has the ``reason``, and ``at`` is when. ``answered_by`` has
    the numbers of later requests that have answered it."""

    agent: str | None
    said: str
    number: int
    at: float
    model: str | None = None
    running: int = 0
    reason: str | None = None
    call: str | None = None
    detail: str | None = None
    since: float | None = None
    """From when on the proxy was away."""
    answered_by: list[int] = field(default_factory=list)

    def is_by(self, agent: str) -> bool:
        return self.agent is None or self.agent == agent

    def is_like(self, other: Attempt) -> bool:
        """Tell whether both say the same, so that what answers the later one answers the earlier."""
        return (self.agent, self.said) == (other.agent, other.said)

    def to_json(self) -> dict[str, Any]:
        fields = {
            "since": self.since, "agent": self.agent, "call": self.call, "model": self.model, "detail": self.detail,
        }
        return {"at": self.at, "reason": self.reason} | {name: one for name, one in fields.items() if one}


@dataclass(slots=True)
class Attempts:
    """The attempts of one episode: the ones in flight by their number, and those ``lost`` to the world. ``begun``
    requests have become calls. ``dropped`` lost ones were too many to be kept."""

    begun: int = 0
    running: dict[int, Attempt] = field(default_factory=dict)
    lost: list[Attempt] = field(default_factory=list)
    dropped: int = 0
    dropped_at: float = 0.0

    def begin(self, said: str, agent: str, model: str, calls: int, at: float) -> int:
        """The number of a request that becomes so many `calls`."""
        self.begun += 1
        self.running[self.begun] = Attempt(agent, said, self.begun, at, model, calls)
        return self.begun

    def open_to(self, agent: str) -> tuple[str, ...]:
        """Return what those said that a request of `agent` which begins now may answer."""
        return tuple(dict.fromkeys(
            one.said for one in self._all() if one.said and one.is_by(agent) and len(one.answered_by) < SURE
        ))

    def end(self, number: int) -> Attempt:
        """A call of request `number` that was in flight has ended. Its attempt."""
        attempt = self.running[number]
        attempt.running -= 1
        if not attempt.running:
            del self.running[number]
        return attempt

    def answer(self, number: int, agent: str, begins: Collection[str]) -> None:
        """Request `number` of `agent` was answered, which begins with what is in `begins`."""
        for one in self._all():
            known = not one.said or one.said in begins
            if known and one.number < number and one.is_by(agent) and len(one.answered_by) < SURE:
                one.answered_by.append(number)

    def take_back(self, number: int) -> None:
        """The client of request `number` was not sent the end of its answer after all."""
        for one in self._all():
            one.answered_by = [other for other in one.answered_by if other != number]

    def lose(self, attempt: Attempt) -> None:
        """`attempt`, which has a reason, was lost to the world. Whatever answers it answers earlier ones that said the
        same, so it stands for them too."""
        if attempt.call is not None and any(one.number == attempt.number and one.call for one in self.lost):
            return  # for another of its choices
        self.lost = [
            one for one in self.lost
            if one.answered_by or not one.is_like(attempt) or one.number > attempt.number
        ]
        if len(self.lost) >= MOST:
            self.lost = [one for one in self.lost if not one.answered_by]
        if len(self.lost) < MOST:
            self.lost.append(attempt)
        else:
            self.dropped, self.dropped_at = self.dropped + 1, attempt.at

    def adds(self, attempt: Attempt) -> bool:
        """Tell whether it would change anything to `lose` an attempt that became no call."""
        alike = (one for one in self.lost if not one.answered_by and one.is_like(attempt))
        earlier = next(alike, None)
        if earlier is None:
            return not self.dropped or len(self.lost) < MOST
        return any(one.number > earlier.number for one in self.running.values())  # which may answer the earlier one

    def settle(self) -> None:
        """Nothing is answered any more: keep what is shown."""
        self.running, self.lost = {}, [one for one in self.lost if not one.answered_by]

    def unanswered(self) -> list[dict[str, Any]]:
        """Show those that went unanswered, in the order in which they were lost."""
        shown = [one.to_json() for one in self.lost if not one.answered_by]
        if self.dropped:
            shown.append({"at": self.dropped_at, "reason": MORE, "detail": f"{self.dropped} or more were not kept"})
        return shown

    def _all(self) -> Iterator[Attempt]:
        yield from self.running.values()
        yield from self.lost
