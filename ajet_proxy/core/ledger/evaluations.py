"""Evaluations that a trainer wants: how many episodes of a model at one policy version, and what came of them.

Idea: which episodes belong to an evaluation is decided as they are opened, while it is current and not full. It is
current while no newer one of its model is wanted, and while the version that it is of still serves. So every episode
of it begins under one version. A discarded episode belongs to it no longer, and another is wanted in its place.

The episodes have places, from 0. So programs that share an evaluation go through their tasks once, together: each says
which place it plays, and only the next one can be opened. A place that was given back is the next one again when all
have been given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Evaluation:
    """The latest of its model. `playing` are its episodes that have not ended, and `rewards` has those that have: None
    for one without a reward. `places` has all of them."""

    id: str
    model: str
    policy_version: int
    wanted: int
    playing: set[str] = field(default_factory=set)
    rewards: dict[str, float | None] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    given_back: list[int] = field(default_factory=list)
    lost: int = 0
    """How many were discarded, and are wanted again."""
    branch: int = 0
    """The branch that its version is on (`ajet_proxy.core.ledger.births`)."""

    @property
    def opened(self) -> int:
        return len(self.playing) + len(self.rewards)

    @property
    def missing(self) -> int:
        """How many episodes are still to be opened."""
        return self.wanted - self.opened

    @property
    def next(self) -> int:
        """The place of the episode that is opened next, where one is missing."""
        given = len(self.places) + len(self.given_back)
        return given if given < self.wanted or not self.given_back else self.given_back[0]

    def begin(self, episode: str) -> None:
        """An episode of it is opened."""
        self.places[episode] = place = self.next
        self.given_back = [other for other in self.given_back if other != place]
        self.playing.add(episode)

    def moved(self, episode: str, state: str, reward: float | None) -> None:
        """An episode is now in `state`. It may be of an earlier evaluation that had the same name."""
        if episode not in self.places:
            return
        if state == "recorded":
            self.rewards[episode] = reward
        if state == "discarded" and episode in self.playing:
            self.lost += 1
        if state != "sealed":
            self.playing.discard(episode)
        if state == "discarded":
            self.given_back.append(self.places.pop(episode))

    def to_json(self) -> dict[str, Any]:
        rewards = [reward for reward in self.rewards.values() if reward is not None]
        return {
            "evaluation": self.id, "model": self.model, "policy_version": self.policy_version, "wanted": self.wanted,
            "opened": self.opened, "done": len(self.rewards), "lost": self.lost, "rewards": rewards,
            "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
        }
