"""Data sets that are being played: which places of one are taken, and which are still to be played.

Idea: the ledger is the cursor. A play has the places 0, 1, 2 …, and each of its episodes says which place it plays. A
place belongs to one episode at a time. An episode that is discarded gives its place back, so that it is played again.
So a runner that is killed asks what is missing, and plays exactly that. Only what a trainer has seen and left out
(``filtered``) counts as played: its group had it.

Invariant: the places of the episodes that were opened and not given back are distinct. If none is missing, they are
0 to ``episodes - 1``. A play takes memory for what was given back, and not for what was played.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.evaluations import Evaluation
from ajet_proxy.core.ledger.weights import Weights
from ajet_sdk.errors import NotFound

SHOWN = 100
"""So many places that were given back are told at once, the lowest first."""
Key = tuple[str, str]
"""A tenant, and the name of one of its plays."""


@dataclass(slots=True)
class Play:
    """``number`` counts all plays, so that one that begins again under its name is another. ``next`` is the lowest
    place that was never opened, ``given_back`` are those to be played again, in order."""

    tenant: str
    name: str
    episodes: int
    number: int
    next: int = 0
    given_back: list[int] = field(default_factory=list)
    done: int = 0
    """How many have ended and keep their places."""
    lost: int = 0
    """How many were discarded, and gave their places back."""

    @property
    def opened(self) -> int:
        return self.next - len(self.given_back)

    @property
    def missing(self) -> int:
        """How many places are still to be opened."""
        return self.episodes - self.opened

    def has_free(self, place: int) -> bool:
        """Whether `place` can be opened: it is the next one, or was given back."""
        at = bisect_left(self.given_back, place)
        return place == self.next < self.episodes or self.given_back[at : at + 1] == [place]

    def begin(self, place: int) -> None:
        """An episode of it is opened at a free `place`."""
        if place == self.next:
            self.next += 1
        else:
            self.given_back.remove(place)

    def moved(self, place: int, before: str, state: str, reason: str | None) -> None:
        """The episode at `place` went from the state `before` to `state`; `reason` is why it is discarded."""
        was_playing = before in ("open", "sealed")
        if state == "discarded" and reason != "filtered":
            insort(self.given_back, place)
            self.lost += 1
            self.done -= not was_playing
        elif was_playing and state != "sealed":
            self.done += 1

    def to_json(self, after: int = -1) -> dict[str, Any]:
        """As it is told, with the places that were given back behind the place `after`."""
        first = bisect_right(self.given_back, after)
        return {
            "play": self.name, "episodes": self.episodes, "opened": self.opened, "done": self.done, "lost": self.lost,
            "missing": self.missing, "next": self.next if self.next < self.episodes else None,
            "given_back": self.given_back[first : first + SHOWN],
        }


class Plays:
    """Every play by its key, and the latest evaluation of each model."""

    KEPT = ("table", "begun", "evaluations")

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.table: dict[Key, Play] = {}
        self.begun = 0
        self.evaluations: dict[str, Evaluation] = {}

    def play(self, tenant: str, name: str) -> Play:
        """The play of `tenant` called `name`, or `NotFound`."""
        known = self.table.get((tenant, name))
        if known is None:
            raise NotFound(f"no play {name}: it is whole, was given up, or never began", code="unknown_play")
        return known

    def evaluation(self, name: str | None) -> Evaluation | None:
        """The evaluation called `name`, as long as it is the latest of its model."""
        return next((one for one in self.evaluations.values() if one.id == name), None)

    def wanted(self) -> dict[str, int]:
        """How many evaluation episodes of each model are still to be opened now, where any are. What another version
        would play is wanted no more, nor what one would play that was made again."""
        return {
            one.model: one.missing for one in self.evaluations.values()
            if one.missing > 0 and one.policy_version == self._weights.policy_version(one.model)
            and one.branch == self._weights.born(one.model).last
        }

    def number(self, tenant: str, name: str | None) -> int | None:
        """The number of the play called `name`, if there is one."""
        known = self.table.get((tenant, name or ""))
        return None if known is None else known.number

    def moved(self, episode: Episode, before: str) -> None:
        """`episode` came from the state `before` to the one that it is in."""
        if episode.place is not None and episode.play is not None:
            play = self.table.get((episode.tenant, episode.play))
            if play is not None and play.number == episode.play_number:
                play.moved(episode.place, before, episode.state, episode.reason)
        self.rewarded(episode)

    def rewarded(self, episode: Episode) -> None:
        """Tells the evaluation of `episode`, if it has one that still counts, how it stands."""
        if (evaluation := self.evaluation(episode.evaluation)) is not None:
            evaluation.moved(episode.id, episode.state, episode.reward())

    def _begun(self, event: ev.PlayBegun) -> None:
        self.table[event.tenant, event.play] = Play(event.tenant, event.play, event.episodes, self.begun)
        self.begun += 1

    def _ended(self, event: ev.PlayEnded) -> None:
        del self.table[event.tenant, event.play]

    def _evaluation_wanted(self, event: ev.EvaluationWanted) -> None:
        self.evaluations[event.model] = Evaluation(
            event.evaluation, event.model, event.policy_version, event.episodes,
            branch=self._weights.born(event.model).last,
        )

    def _opened(self, event: ev.EpisodeOpened) -> None:
        if event.play is not None and event.place is not None:
            self.table[event.tenant, event.play].begin(event.place)
        if (evaluation := self.evaluation(event.evaluation)) is not None:
            evaluation.begin(event.episode)
