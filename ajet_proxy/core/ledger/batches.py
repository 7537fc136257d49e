"""The batches: what each lease has taken, and what became of it."""

from __future__ import annotations

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.episodes import Episodes
from ajet_proxy.core.ledger.life import Life
from ajet_proxy.core.ledger.mixes import Mixes
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.seats import Seats
from ajet_proxy.core.ledger.weights import Weights
from ajet_sdk.errors import NotFound


class Batches(dict[str, LeasedBatch]):
    """The batches in memory, by their ids. ``leases`` counts all that there ever were. As episodes, they are
    ``leaving`` until they are known to be in the archive."""

    KEPT = ("leases",)

    def __init__(
        self, episodes: Episodes, seats: Seats, life: Life, weights: Weights, mixes: Mixes
    ) -> None:
        self._episodes, self._seats, self._life, self._weights, self._mixes = episodes, seats, life, weights, mixes
        self.leased: dict[str, LeasedBatch] = {}
        self.leaving: dict[str, LeasedBatch] = {}
        self.leases = 0

    def known(self, batch: str) -> LeasedBatch:
        """`batch`, wherever it is by now, or `NotFound`."""
        known = self.get(batch) or self.leaving.get(batch)
        if known is None and self._episodes.archive is not None:
            known = self._episodes.archive.batch(batch)
        if known is None:
            raise NotFound(f"no batch {batch}", code="unknown_batch")
        return known

    def derive(self) -> None:
        """Rebuild whatever follows from the batches."""
        self.leased = {name: batch for name, batch in self.items() if batch.state == "leased"}

    def _leased(self, event: ev.BatchLeased) -> None:
        batch = self[event.batch] = self.leased[event.batch] = LeasedBatch(
            event.batch, event.model, event.lease_until, event.policy_version, event.groups, self.leases,
            branch=self._weights.born(event.model).last,
        )
        self.leases += 1
        self._mixes.leased(event.model, [self._episodes[names[0]].group_key.lane for _, names in event.groups])
        for _, names in event.groups:
            if earlier := self._seats.earlier(event.model, names, event.size):
                batch.earlier[names[0]] = earlier
        for episode in map(self._episodes.__getitem__, batch.episodes()):
            batch.rewards_at_lease[episode.id] = len(episode.rewards)
            self._share(episode, batch.model, batch.id, event.at)

    def _extended(self, event: ev.LeaseExtended) -> None:
        self[event.batch].lease_until = event.lease_until

    def _returned(self, event: ev.BatchReturned) -> None:
        batch = self.leased.pop(event.batch)
        batch.state = "returned"
        for episode in map(self._episodes.__getitem__, batch.episodes()):
            self._share(episode, batch.model, None, event.at)
            if event.reason == "nack":
                episode.shares.untake(batch.model)
            if episode.withdrawn:
                self._life.drop(episode, batch.model, "withdrawn", event.at)

    def _trained(self, event: ev.BatchTrained) -> None:
        batch = self[event.batch]
        for episode in map(self._episodes.__getitem__, batch.episodes()):
            if (why := event.filtered.get(episode.id)) is None:
                episode.shares.learn(batch.model, event.policy_version)
                self._share(episode, batch.model, "", event.at)
            else:
                episode.shares.learn(batch.model, f"filtered: {why}")
                self._life.drop(episode, batch.model, why, event.at)
        batch.state = "trained"
        self.leased.pop(batch.id, None)

    def _share(self, episode: Episode, model: str, share: str | None, at: float) -> None:
        """If the share is ready, it stands in its queue. Otherwise its trainer has had it."""
        if episode.shares.by_model[model] is None:
            self._seats.leave(episode, model, cut=True)
        episode.shares.set(model, share)
        if share is None:
            self._seats.ready(episode, model, at)
        self._life.add_up(episode, at)

    def _archived(self, event: ev.EpisodesArchived) -> None:
        for name in event.batches:
            self.leaving[name] = self.pop(name)

    def _started(self, event: ev.ProxyStarted) -> None:
        for batch in self.leased.values():
            batch.lease_until += event.back
