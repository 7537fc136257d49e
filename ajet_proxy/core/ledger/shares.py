"""The shares of an episode: the models that train it, and what came of each.

Idea: each model that is trained from an episode has a share of it, which goes its own way: it is ready, leased, or
trained. The shares add up to the state of the episode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Shares:
    """Those of one episode; none before it is ready."""

    by_model: dict[str, str | None] = field(default_factory=dict)
    """Each model that it trains, with None (ready), a batch id (leased) or ``""`` (trained)."""
    taken: set[str] = field(default_factory=set)
    """The models whose trainer has had their share, and has not said that it trained nothing of it."""
    learned: dict[str, int | str] = field(default_factory=dict)
    """What came of a model's share: the policy version that learned from it, or why none does."""

    def share_among(self, models: Collection[str], others: Mapping[str, str]) -> None:
        """Each of `models` has a share, which is ready. `others` learn nothing, each for a reason."""
        self.by_model = dict.fromkeys(models)
        self.learned |= others

    def set(self, model: str, share: str | None) -> None:
        """The share of a model is ready (None), leased (the batch), or trained (``""``)."""
        self.by_model[model] = share
        if share is not None:
            self.taken.add(model)

    def untake(self, model: str) -> None:
        """The trainer of a model says that it trained nothing of its share."""
        self.taken.discard(model)

    def drop(self, model: str) -> None:
        """A model learns nothing from it."""
        del self.by_model[model]
        self.taken.discard(model)

    def learn(self, model: str, came: int | str) -> None:
        """This came of a model's share: the version that learned from it, or why none does."""
        self.learned[model] = came

    @property
    def state(self) -> str:
        """The state that they add up to: leased if any is, else ready if any is, else trained."""
        if any(self.by_model.values()):
            return "leased"
        return "ready" if None in self.by_model.values() else "trained"
