"""The rate at which each model's turns drifted: what its sealed episodes add up to, and the line that warns of it.

A turn is a call that has an earlier one of the same model and agent in its episode, so that it could have continued
that. It drifted if it did not, because the prompt says the same with other tokens (`DRIFTED`): the model then reads a
past that it never had. The other reasons of `core.trajectory.drift` are the agent's own doing: it edited, forked or
summarized.

Invariant: the counters and the window of latest turns are a function of the sequence of episodes added, so that a
replay warns as the live daemon did. The rate is that of the window, so an old fault that was repaired stops warning.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from ajet_proxy.core.trajectory.drift import DRIFTED
from ajet_proxy.core.trajectory.timeline import Chain, Timeline

WINDOW = 1000
"""The rate is that of so many of the latest turns, in whole episodes."""
LIMIT = 0.05
"""A rate above this is an alert."""
LEAST = 50
"""With fewer turns than this in the window there is no rate yet."""


class Drift:
    """The turns of one model. ``broken`` counts the timelines that began anew, by reason."""

    def __init__(self) -> None:
        self.turns = 0
        self.broken: Counter[str] = Counter()
        self._window: deque[tuple[int, int]] = deque()
        self._recent = self._drifted = 0

    def add(self, turns: int, broken: Counter[str]) -> None:
        """Count one episode's `turns`, and how many of them were `broken`, by reason."""
        drifted = sum(broken[reason] for reason in DRIFTED)
        self.turns += turns
        self.broken += broken
        self._window.append((turns, drifted))
        self._recent += turns
        self._drifted += drifted
        while self._recent - self._window[0][0] >= WINDOW:
            old, old_drifted = self._window.popleft()
            self._recent -= old
            self._drifted -= old_drifted

    @property
    def rate(self) -> float | None:
        """The share of the latest turns that drifted; None while they are too few."""
        return self._drifted / self._recent if self._recent >= LEAST else None

    def alert(self, model: str) -> str | None:
        """The line for an operator if the rate is over `LIMIT`."""
        if (rate := self.rate) is None or rate <= LIMIT:
            return None
        reasons = ", ".join(f"{reason} {self.broken[reason]}" for reason in DRIFTED if self.broken[reason])
        return (
            f"model {model!r}: {self._drifted} of the last {self._recent} turns ({rate:.1%}) were read as other tokens "
            f"than were sampled, over the limit of {LIMIT:.1%} (in all: {reasons})"
        )

    def to_json(self) -> dict[str, Any]:
        return {"turns": self.turns, "broken_by": dict(self.broken), "rate": self.rate}


def by_model(timelines: Iterable[Timeline | Chain]) -> dict[str, tuple[int, Counter[str]]]:
    """The turns of one episode and what broke its timelines, by model; models without turns are left out."""
    turns: Counter[str] = Counter()
    broken: dict[str, Counter[str]] = {}
    for timeline in timelines:
        turns[timeline.model] += len(timeline.turns) - 1
        if timeline.broken_by is not None:
            turns[timeline.model] += 1
            broken.setdefault(timeline.model, Counter())[timeline.broken_by] += 1
    return {model: (count, broken.get(model, Counter())) for model, count in turns.items() if count}
