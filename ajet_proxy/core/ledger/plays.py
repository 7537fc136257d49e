"""Data sets that are being played, and evaluations, which are plays that a trainer wants: which places of one are
taken, and which are still to be played.

Idea: the ledger is the cursor. A play has the places 0, 1, 2 …, and each of its episodes plays one of them. A place
belongs to one episode at a time. One that awaits a judgement has been played, but an evaluation waits for its reward.
An episode that is discarded gives its place back, so that it is played again. So a runner that is killed asks what is
missing, and plays exactly that. Only what a trainer has seen and left out (``filtered``) counts as played: its group
had it.

Which episodes belong to an evaluation is decided as they are opened, while it is current and not full. It is current
while no newer one of its model is wanted, and while the version that it is of still serves. So every episode of it
begins under one version. Programs that share an evaluation go through their tasks once, together: only its next place
can be opened.

Invariant: the places of the episodes that were opened and not given back are distinct. If none is missing, they are
0 to ``episodes - 1``. A play takes memory for what was given back, and not for what was played.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.weights import Weights
from ajet_sdk.errors import NotFound

SHOWN = 100
"""So many places that were given back are told at once, the lowest first."""
STANDS_S = 300.0
"""An evaluation of a candidate in which nothing is opened for so long does not go on."""
Key = tuple[str, str]
"""A tenant, and the name of one of its plays."""


@dataclass(slots=True)
class Play:
    """``number`` counts all plays, so that one that begins again under its name is another. ``next`` is the lowest
    place that was never opened, ``given_back`` are those to be played again, in the order in which they came back."""

    PLAYING: ClassVar[tuple[str, ...]] = ("open", "sealed")
    """An episode that is ``awaiting`` a judgement is not played any more."""
    tenant: str
    name: str
    episodes: int
    number: int
    next: int = 0
    given_back: dict[int, None] = field(default_factory=dict)
    done: int = 0
    """The number of episodes that have ended and keep their places."""
    lost: int = 0
    """The number of episodes that were discarded, and gave their places back."""

    @property
    def opened(self) -> int:
        return self.next - len(self.given_back)

    @property
    def missing(self) -> int:
        """The number of places that are still to be opened."""
        return self.episodes - self.opened

    def has_free(self, place: int) -> bool:
        """Tell whether `place` can be opened: it is the next one, or was given back."""
        return place == self.next < self.episodes or place in self.given_back

    def begin(self, place: int) -> None:
        """An episode of it is opened at a free `place`."""
        if place == self.next:
            self.next += 1
        else:
            del self.given_back[place]

    def moved(self, place: int, before: str, state: str, reason: str | None) -> None:
        """The episode at `place` went from the state `before` to `state`; `reason` is why it is discarded."""
        was_playing = before in self.PLAYING
        if state == "discarded" and reason != "filtered":
            self.given_back[place] = None
            self.lost += 1
            self.done -= not was_playing
        elif was_playing and state not in self.PLAYING:
            self.done += 1

    def to_json(self, after: int = -1) -> dict[str, Any]:
        """As it is told, with the places that were given back behind the place `after`."""
        return {
            "play": self.name, "episodes": self.episodes, "opened": self.opened, "done": self.done, "lost": self.lost,
            "missing": self.missing, "next": self.next if self.next < self.episodes else None,
            "given_back": heapq.nsmallest(SHOWN, (place for place in self.given_back if place > after)),
        }


@dataclass(slots=True)
class Evaluation(Play):
    """The latest of its model. ``rewards`` are those of the places that have ended: None for one without."""

    PLAYING: ClassVar[tuple[str, ...]] = ("open", "sealed", "awaiting")
    model: str = ""
    policy_version: int = 0
    branch: int = 0
    """The branch that its version is on (`ajet_proxy.core.ledger.births`)."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    told: dict[int, tuple[str, float]] = field(default_factory=dict)
    """By such a place, its task, and the tokens that were sampled in it, a call."""
    opened_at: float = 0.0
    """When it was wanted, or when its latest episode was opened, in Unix seconds."""

    @property
    def due(self) -> int:
        """The place of the episode that is opened next, where one is missing. What was given back comes last, and in
        that order, so that a place that always fails holds up no other."""
        return next(iter(self.given_back), self.next) if self.next == self.episodes else self.next

    def to_json(self, after: int = -1) -> dict[str, Any]:
        rewards = [reward for reward in self.rewards.values() if reward is not None]
        return {
            "evaluation": self.name, "model": self.model, "policy_version": self.policy_version,
            "wanted": self.episodes, "opened": self.opened, "done": self.done, "lost": self.lost, "rewards": rewards,
            "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
            "played": [
                {"task": self.told[place][0], "reward": reward, "tokens": self.told[place][1]}
                for place, reward in sorted(self.rewards.items())
            ],
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
        return next((one for one in self.evaluations.values() if one.name == name), None)

    def of(self, opened: ev.EpisodeOpened) -> Play | None:
        """The play or the evaluation of an episode, if it has one that is still known."""
        found = self.table.get((opened.tenant, opened.play or ""))
        return found if opened.play is not None else self.evaluation(opened.evaluation)

    def wanted(self) -> dict[str, int]:
        """Count the evaluation episodes of each model that are still to be opened now, where any are. What another
        version would play is wanted no more, nor what one would play that was made again."""
        return {
            one.model: one.missing for one in self.evaluations.values()
            if one.missing > 0 and one.policy_version == self._weights.policy_version(one.model)
            and one.branch == self._weights.born(one.model).last
        }

    def moved(self, episode: Episode, before: str, state: str | None = None) -> None:
        """`episode` came from the state `before` to the one that it is in, or to `state`. One that is sealed and awaits
        a judgement is ``awaiting`` here."""
        if (play := self._its(episode)) is not None and episode.opening.place is not None:
            play.moved(episode.opening.place, before, state or episode.state, episode.reason)
            self.rewarded(episode)

    def rewarded(self, episode: Episode) -> None:
        """Tells the evaluation of `episode`, if it has one, what it earned in the end."""
        play = self._its(episode)
        if isinstance(play, Evaluation) and episode.opening.place is not None and episode.state == "recorded":
            play.rewards[episode.opening.place] = episode.reward()
            sampled = [turn.sampled for turn in episode.transcript.turns()]
            play.told[episode.opening.place] = episode.opening.task or "", sum(sampled) / max(1, len(sampled))

    def _its(self, episode: Episode) -> Play | None:
        """The play or the evaluation in which `episode` was opened, and no later one of that name."""
        play = self.of(episode.opening)
        return None if play is None or play.number != episode.play_number else play

    def _begun(self, event: ev.PlayBegun) -> None:
        self.table[event.tenant, event.play] = Play(event.tenant, event.play, event.episodes, self.begun)
        self.begun += 1

    def _ended(self, event: ev.PlayEnded) -> None:
        del self.table[event.tenant, event.play]

    def _started(self, event: ev.ProxyStarted) -> None:
        for evaluation in self.evaluations.values():
            evaluation.opened_at += event.back

    def _evaluation_wanted(self, event: ev.EvaluationWanted) -> None:
        self.evaluations[event.model] = Evaluation(
            "", event.evaluation, event.episodes, self.begun, model=event.model, policy_version=event.policy_version,
            branch=self._weights.born(event.model).last, opened_at=event.at,
        )
        self.begun += 1

    def _opened(self, event: ev.EpisodeOpened) -> None:
        if (play := self.of(event)) is not None and event.place is not None:
            play.begin(event.place)
            if isinstance(play, Evaluation):
                play.opened_at = event.at

    def alerts(self, now: float) -> dict[str, str]:
        """A line about each candidate whose evaluation does not go on."""
        found, weights = {}, self._weights
        for name, one in weights.candidates.items():
            trainer = weights.trainers.get(one.of)
            its = [play for model in (name, one.of) if (play := self.evaluations.get(model)) is not None]
            done = next((play.done >= play.episodes for play in its if play.model == name and
                         play.opened_at >= one.since), False)  # fmt: skip
            latest = max((play.opened_at for play in its), default=0.0)
            if not done and now - max(one.since, latest) > STANDS_S and not (trainer is not None and trainer.left):
                found[f"candidate {name!r}"] = (
                    f"candidate {name!r} of model {one.of!r} (version {one.version}) waits for its evaluation: does "
                    f"anybody play (`ajet run --eval --wanted`), and is its engine there?"
                )
        return found
