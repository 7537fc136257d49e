"""Evaluations that a trainer wants: how many episodes of a model at one policy version, and what came of them.

Idea: which episodes belong to an evaluation is decided as they are opened, while it is current and not full. It is
current while no newer one of its model is wanted, and while the version that it is of still serves. So every episode
of it begins under one version. A discarded episode belongs to it no longer, and another is wanted in its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Evaluation:
    """The latest of its model. `playing` are its episodes that have not ended, and `rewards` has those that have: None
    for one without a reward."""

    id: str
    model: str
    policy_version: int
    wanted: int
    playing: set[str] = field(default_factory=set)
    rewards: dict[str, float | None] = field(default_factory=dict)
    lost: int = 0
    """How many were discarded, and are wanted again."""

    @property
    def opened(self) -> int:
        return len(self.playing) + len(self.rewards)

    @property
    def missing(self) -> int:
        """How many episodes are still to be opened."""
        return self.wanted - self.opened

    def moved(self, episode: str, state: str, reward: float | None) -> None:
        """An episode of it is now in `state`."""
        if state == "recorded":
            self.rewards[episode] = reward
        if state == "discarded" and episode in self.playing:
            self.lost += 1
        if state != "sealed":
            self.playing.discard(episode)

    def to_json(self) -> dict[str, Any]:
        rewards = [reward for reward in self.rewards.values() if reward is not None]
        return {
            "evaluation": self.id, "model": self.model, "policy_version": self.policy_version, "wanted": self.wanted,
            "opened": self.opened, "done": len(self.rewards), "lost": self.lost, "rewards": rewards,
            "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
        }
