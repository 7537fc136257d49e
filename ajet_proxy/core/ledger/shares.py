"""Who has which share of an episode: a model's share is ready, leased or trained.

Idea: a share that is ready stands in its queue, and counts in its group key and for the mix of its model. A lease takes
it from there, and it comes back if the batch is returned. The shares of an episode add up to its state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.births import Births
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.groups import LATE, OPEN
from ajet_proxy.core.ledger.mix import LaneMix, Mix, QueueCredit, Turns
from ajet_proxy.core.ledger.progress import GroupKey, OpenCounts, Progress
from ajet_proxy.core.ledger.queues import LeasedBatch, ReadyQueues

STALE, NO_SIGNAL = "stale", "no_signal: all rewards of its group are equal"
"""Why a ready episode is discarded with which the others of its group are compared all the same."""
OTHERS_DOING = ("aborted", "older_revision", "other_run")
"""Reasons to discard what is ready that no lease has found. They say nothing of whether its lane can be leased."""


class Shares:
    """What batches do to the state, which has these fields (`ajet_proxy.core.ledger.state.State`)."""

    episodes: dict[str, Episode]
    batches: dict[str, LeasedBatch]
    leased: dict[str, LeasedBatch]
    leases: int
    queues: ReadyQueues
    progress: Progress
    unsettled: dict[str, Episode]
    mix: Mix
    open_counts: OpenCounts
    waits_since: float
    own: dict[str, LaneMix]
    credits: dict[str, QueueCredit]
    births: dict[str, Births]
    directed: Callable[[str], LaneMix]
    stood: Callable[[str, float], float]
    _move: Callable[..., None]
    _opens: Callable[[Episode, int], None]

    def _leased(self, event: ev.BatchLeased) -> None:
        batch = self.batches[event.batch] = self.leased[event.batch] = LeasedBatch(
            event.batch, event.model, event.lease_until, event.policy_version, event.groups, self.leases,
            branch=self.born(event.model).last,
        )
        self.leases += 1
        lane_mix = self.directed(event.model)
        lane_mix.counts.ignored.clear()
        if lane_mix.mix.shares:
            credit = self._standing(event.model)
            turns = Turns(lane_mix.mix.shares, credit, len(event.groups))
            for _, names in event.groups:
                turns.take(lane := self.episodes[names[0]].lane)
                credit.discarded.pop(lane, None)
        for _, names in event.groups:
            if earlier := self.earlier(event.model, names, event.size):
                batch.earlier[names[0]] = earlier
        for episode in map(self.episodes.__getitem__, batch.episodes()):
            batch.rewards_at_lease[episode.id] = len(episode.rewards)
            self._share(episode, batch.model, batch.id, event.at)

    def _extended(self, event: ev.LeaseExtended) -> None:
        self.batches[event.batch].lease_until = event.lease_until

    def _returned(self, event: ev.BatchReturned) -> None:
        batch = self.leased.pop(event.batch)
        batch.state = "returned"
        for episode in map(self.episodes.__getitem__, batch.episodes()):
            self._share(episode, batch.model, None, event.at)
            if event.reason == "nack":
                episode.taken.discard(batch.model)

    def _trained(self, event: ev.BatchTrained) -> None:
        batch = self.batches[event.batch]
        for episode in map(self.episodes.__getitem__, batch.episodes()):
            if (why := event.filtered.get(episode.id)) is None:
                episode.learned[batch.model] = event.policy_version
                self._share(episode, batch.model, "", event.at)
            else:
                episode.learned[batch.model] = f"filtered: {why}"
                self._filtered(episode, batch.model, why, event.at)
        batch.state = "trained"
        self.leased.pop(batch.id, None)

    def _filtered(self, episode: Episode, model: str, why: str, at: float, cut: bool = False) -> None:
        """`model` learns nothing from the episode, for the reason `why`; it is discarded if no other model does. If it
        was ready, others may still be compared with it (`cut`)."""
        if episode.shares.pop(model) is None:
            self._drop(episode, model, at, why, cut)
        episode.taken.discard(model)
        self.queues.forget(model, episode.id)
        if episode.shares:
            self._add_up(episode, at)
        else:
            self._move(episode, "discarded", at, "filtered", why)

    def _share(self, episode: Episode, model: str, share: str | None, at: float) -> None:
        """If the share is ready, it stands in its queue. Otherwise its trainer has had it."""
        if episode.shares[model] is None:
            self._unqueue(episode, model, cut=True)
        episode.shares[model] = share
        if share is None:
            self._queue(episode, model, at)
        else:
            episode.taken.add(model)
        self._add_up(episode, at)

    def earlier(self, model: str, names: Sequence[str], size: int) -> tuple[str, ...]:
        """The episodes with which a group of less than `size` is compared besides, if it is leased to `model`. They
        were ready before in the same group, and are rewarded."""
        if len(names) >= size:
            return ()
        found = self.queues.compared(model, GroupKey.of(self.episodes[names[0]]), names)
        known = (self.episodes.get(name) for name in found)
        return tuple(one.id for one in known if one is not None and one.rewarded(model))

    def _queue(self, episode: Episode, model: str, at: float) -> None:
        """The share of `model` is ready."""
        group_key = GroupKey.of(episode)
        if not self.queues.knows(model, episode.id):
            self.queues.sit(model, group_key, episode.id, episode.number, self.stood(model, at))
        lasted = 0.0 if model in episode.taken else self.played(episode, model, at)
        self.queues.add(model, group_key, episode.id, self.oldest(episode, model), lasted)
        self.progress.came(group_key)
        self.directed(model).counts.came(group_key, episode.id)

    def born(self, model: str) -> Births:
        """Which weights the versions of `model` have stood for."""
        return self.births.get(model) or Births()

    def oldest(self, episode: Episode, model: str) -> int:
        """The oldest version, as it is told now, that sampled a token of what `model` learns from the episode."""
        return self.born(model).oldest(episode.sampled_by(model).values())

    def _unqueue(self, episode: Episode, model: str, cut: bool) -> None:
        """The share of `model` is ready no more. The others of its group are still compared with it if that is
        `cut`. Otherwise its seat goes to another."""
        group_key = GroupKey.of(episode)
        self.queues.leave(model, group_key, episode.id, dropped=cut)
        self.progress.went(group_key)
        self.directed(model).counts.went(group_key, episode.id)

    def _drop(self, episode: Episode, model: str, at: float, why: str, cut: bool) -> None:
        """The ready share of `model` is discarded, for the reason `why`."""
        self._unqueue(episode, model, cut)
        if why not in OTHERS_DOING and episode.lane in self.directed(model).mix.shares:
            self._standing(model).discards(episode.lane, at)

    def _sits(self, episode: Episode, at: float) -> None:
        """`episode`, which no evaluation is, takes a seat for each model that it may train."""
        for model in episode.may_train:
            state = LATE if episode.late else OPEN
            self.queues.sit(model, GroupKey.of(episode), episode.id, episode.number, self.stood(model, at), state)

    def _rises(self, episode: Episode, but: Collection[str] = ()) -> None:
        """An episode that was never ready gives up its seats, except for some models."""
        for model in episode.may_train:
            if model not in but:
                self.queues.leave(model, GroupKey.of(episode), episode.id)
                self.queues.forget(model, episode.id)

    def played(self, episode: Episode, model: str, at: float) -> float:
        """For how many seconds an episode could play `model` until `at`."""
        return at - episode.opened_at - (self.stood(model, at) - self.queues.stood(model, episode.id))

    def waited_for(self, model: str | None) -> tuple[str, ...]:
        """The names of the mixes by which a lease of `model` waits; None: of any."""
        return ("", *self.own) if model is None else (model if model in self.own else "",)

    def counts_for(self, name: str, episode: Episode) -> bool:
        """Whether an open episode counts for the mix of that name."""
        models = set(episode.may_train)
        return name in models if name else not models or bool(models - self.own.keys())

    def _recount(self, group_size: int) -> None:
        """Count anew what is open and ready for each mix, by looking through everything. `group_size` is the proxy's
        own."""
        self.open_counts = OpenCounts(self.open_counts.size, self.open_counts.ignored)
        for one in self.own.values():
            one.counts = OpenCounts(one.counts.size, one.counts.ignored)
        for episode in self.unsettled.values():
            if episode.awaited:
                self._opens(episode, 1)
        for model, name in self.queues.ready():
            self.directed(model).counts.came(GroupKey.of(self.episodes[name]), name)
        for name in ("", *self.own):
            self.directed(name).arrange(group_size)

    def _standing(self, model: str) -> QueueCredit:
        return self.credits.setdefault(model, QueueCredit())

    def _add_up(self, episode: Episode, at: float) -> None:
        if (state := episode.share_state()) != episode.state:
            self._move(episode, state, at)
