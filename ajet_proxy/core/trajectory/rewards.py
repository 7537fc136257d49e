"""Rewards as they were given, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EpisodeReward:
    """One reward as it was given. A `call`, an `agent` or a `model` limits the samples it counts for. `state` is that
    in which the call was made."""

    id: str
    value: float
    call: str | None
    agent: str | None
    final: bool
    note: str | None
    at: float
    state: str | None = None
    model: str | None = None

    def to_json(self) -> dict[str, Any]:
        out = {"id": self.id, "value": self.value, "final": self.final, "at": self.at}
        scope = {"call": self.call, "agent": self.agent, "model": self.model, "note": self.note, "state": self.state}
        return out | {name: value for name, value in scope.items() if value is not None}


def total(rewards: Iterable[EpisodeReward]) -> float | None:
    """The sum of the `standing` ones of `rewards`, in whatever order; None if there are none."""
    found = standing(rewards)
    return math.fsum(found) if found else None


def standing(rewards: Iterable[EpisodeReward]) -> list[float]:
    """The values of `rewards` that count. A final reward replaces earlier final ones: those given to the same call, or
    agent and model, or all of them if it is the whole episode's."""
    rewards = list(rewards)
    finals: dict[tuple[str | None, str | None, str | None], float] = {}
    for reward in rewards:
        scope = (None, reward.agent, reward.model) if reward.call is None else (reward.call, None, None)
        if reward.final and scope == (None, None, None):
            finals.clear()
        if reward.final:
            finals[scope] = reward.value
    return [*(reward.value for reward in rewards if not reward.final), *finals.values()]
