"""The seats of episodes: which are taken, and which shares are ready to be leased.

Idea: an episode has a seat for each model that it may train, from its opening until it ends. A share that is ready
stands in its queue, and counts for its group key and for the mix of its model. A lease takes it from there, and it
comes back if the batch is returned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.gates import Gates
from ajet_proxy.core.ledger.groups import LATE, OPEN
from ajet_proxy.core.ledger.mixes import Mixes
from ajet_proxy.core.ledger.progress import Progress
from ajet_proxy.core.ledger.queues import ReadyQueues
from ajet_proxy.core.ledger.weights import Weights


class Seats:
    """The ``queues`` of each model, and the ``progress`` of each group key."""

    KEPT = ("progress", "changes", "flushes")

    def __init__(
        self, episodes: Mapping[str, Episode], queues: ReadyQueues, weights: Weights, gates: Gates, mixes: Mixes
    ) -> None:
        self._episodes, self._weights, self._gates, self._mixes = episodes, weights, gates, mixes
        self.queues, self.progress = queues, Progress()
        self.changes = self.flushes = 0
        """Counts of how often a share that is ready, or is waited for, came or went; and of how often groups were
        flushed."""

    def opens(self, episode: Episode, at: float) -> None:
        """`episode`, which no evaluation is, takes a seat for each model that it may train."""
        if episode.awaited:
            self.progress.change(episode.group_key, open=1, at=episode.opening.at)
            self._mixes.opens(episode, 1)
        state, stood = LATE if episode.late else OPEN, self._gates.stood
        for model in episode.may_train:
            self.queues.sit(model, episode.group_key, episode.id, episode.number, stood(model, at), state)

    def closes(self, episode: Episode, but: Collection[str] = ()) -> None:
        """An episode that is no longer open or sealed, or turns out to be another, gives up the seats that it has never
        been ready on, except for some models."""
        if episode.awaited:
            self.progress.change(episode.group_key, open=-1)
            self._mixes.opens(episode, -1)
        for model in episode.may_train:
            if model not in but:
                self.queues.of(model).leave(episode.id)
                self.queues.forget(model, episode.id)

    def late(self, episode: Episode) -> None:
        """`episode` is waited for no longer from now on."""
        self.progress.change(episode.group_key, open=-1)
        self._mixes.opens(episode, -1)
        for model in episode.may_train:
            self.changes += 1
            self.queues.of(model).late(episode.id)

    def ready(self, episode: Episode, model: str, at: float) -> None:
        """The share of `model` is ready."""
        key = episode.group_key
        if episode.id not in self.queues.of(model).seats:
            self.queues.sit(model, key, episode.id, episode.number, self._gates.stood(model, at))
        lasted = 0.0 if model in episode.shares.taken else self.played(episode, model, at)
        self.changes += 1
        self.queues.of(model).add(key, episode.id, self.changes, self._weights.oldest(episode, model), lasted)
        self.progress.change(key, ready=1)
        self._mixes.of(model).counts.waits(key, 1)

    def leave(self, episode: Episode, model: str, cut: bool) -> None:
        """The share of `model` is ready no more. The others of its group are still compared with it if that is
        `cut`. Otherwise its seat goes to another."""
        key = episode.group_key
        self.changes += 1
        self.queues.of(model).leave(episode.id, dropped=cut)
        self.progress.change(key, ready=-1)
        self._mixes.of(model).counts.waits(key, -1)

    def played(self, episode: Episode, model: str, at: float) -> float:
        """For how many seconds an episode could play `model` until `at`."""
        return at - episode.opening.at - (self._gates.stood(model, at) - self.queues.of(model).seats[episode.id].stood)

    def earlier(self, model: str, names: Sequence[str], size: int) -> tuple[str, ...]:
        """The episodes with which a group of less than `size` is compared besides, if it is leased to `model`. They
        were ready before in the same group, and are rewarded."""
        if len(names) >= size:
            return ()
        known = (self._episodes.get(name) for name in self.queues.of(model).compared(names))
        return tuple(one.id for one in known if one is not None and not one.withdrawn and one.rewarded(model))

    def _started(self, event: ev.ProxyStarted) -> None:
        self.progress.restart(event.at)

    def _flushed(self, event: ev.GroupsFlushed) -> None:
        self.flushes += 1
        self.progress.flush(event.lane, event.task)
