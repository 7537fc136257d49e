"""The mix of each model, with what is open and ready for it, and the turns of its lanes.

Idea: each model counts for itself. What one of them leaves lying holds up no other. An episode counts for each model
that it may train. The mix called "" is that of what no announced model learns. It becomes that of the first model that
is announced. An episode that names no model counts for the only one that is announced.

Invariant: every count is that of the episodes that are open, sealed or ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.mix import Mix, QueueCredit, Turns
from ajet_proxy.core.ledger.progress import GroupKey, OpenCounts
from ajet_proxy.core.ledger.queues import ReadyQueues
from ajet_proxy.core.ledger.weights import Weights

OTHERS_DOING = ("aborted", "older_revision", "other_run")
"""Reasons to discard what is ready that no lease has found. They say nothing of whether its lane can be leased."""


@dataclass(slots=True)
class LaneMix:
    """The mix of one model, with what is open and ready for it (``counts``), and the ``credit`` of its lanes. Lanes are
    waited for ``since`` then: the shares were set, or the proxy started after that."""

    mix: Mix = Mix()  # noqa: RUF009
    counts: OpenCounts = field(default_factory=OpenCounts)
    credit: QueueCredit = field(default_factory=QueueCredit)
    since: float = 0.0

    def room(self, lane: str) -> int | None:
        """The number of episodes of `lane` that may still be opened now; None: any number."""
        most = self.mix.room(lane, self.counts.size)
        return None if most is None else max(0, most - self.counts.of(lane))

    def lends(self, lane: str, at: float) -> bool:
        """Tell whether a lane without a group is waited for no longer."""
        return self.credit.lends(lane, self.since, self.mix.lane_wait_s, at)


class Mixes:
    """The mix of each model, by its name. ``group_size`` is that of models whose mix names none."""

    KEPT = ("table", "models", "orders", "group_size")

    def __init__(
        self, weights: Weights, episodes: Mapping[str, Episode], queues: ReadyQueues, group_size: int
    ) -> None:
        self._weights, self._episodes, self._queues = weights, episodes, queues
        self.group_size = group_size
        self.table = {"": self._new()}
        self.models: tuple[str, ...] = ()
        """The models that are announced, as far as it is counted for them."""
        self.orders = 0
        """The number of times that a mix was set."""

    def name(self, model: str) -> str:
        """Under which name the mix of `model` stands; of "", that of the only model that is announced."""
        model = model or self._weights.only_model()
        return model if model in self.table else ""

    def of(self, model: str) -> LaneMix:
        """The mix that holds for `model`."""
        return self.table[self.name(model)]

    def names(self, models: Iterable[str]) -> Sequence[str]:
        """The names of the mixes of `models`, each once; without any, of the one that holds for no model in
        particular."""
        return tuple(dict.fromkeys(map(self.name, models))) or (self.name(""),)

    def several(self, models: Iterable[str]) -> list[LaneMix]:
        """The mixes of `models`, each once."""
        return [self.table[name] for name in self.names(models)]

    def waited_for(self, model: str | None) -> Sequence[str]:
        """The names of the mixes by which a lease of `model` waits; None: of any."""
        return tuple(self.table) if model is None else self.names([model])

    def counts_for(self, name: str, episode: Episode) -> bool:
        """Tell whether an open episode counts for the mix of that name."""
        return name in self.names(episode.may_train)

    def room(self, lane: str, models: Iterable[str] = ()) -> int | None:
        """The number of episodes of `lane`, to train `models`, that may still be opened now; None: any number. There is
        room as long as any of them has some: the slower ones of a team hold up nobody."""
        rooms = [one.room(lane) for one in self.several(models)]
        return max(0 if room is None else room for room in rooms) if None not in rooms else None

    def paced(self) -> bool:
        """Tell whether any lane may be full."""
        return any(one.mix.ahead is not None for one in self.table.values())

    def lacking(self, group_key: GroupKey, models: Iterable[str] = ()) -> int:
        """The number of episodes that the group lacks, of any of `models`, that was begun in a group key."""
        return max(one.counts.lacking(group_key) for one in self.several(models))

    # -- what happens to episodes

    def opens(self, episode: Episode, change: int) -> None:
        """`episode`, which a group waits for, is open or sealed (1), or no more (-1)."""
        for one in self.several(episode.may_train):
            if episode.id not in one.counts.silent:
                one.counts.plays(episode.group_key, change)
            elif change < 0:
                one.counts.silent.remove(episode.id)

    def stirs(self, episode: Episode) -> None:
        """An agent has done something with an open `episode`. So it counts again if it was silent."""
        for one in self.table.values():
            if episode.id in one.counts.silent:
                one.counts.silent.remove(episode.id)
                one.counts.plays(episode.group_key, 1)

    def ready_anew(self, model: str, lane: str, at: float) -> None:
        """An episode of `lane` has become ready for `model`."""
        if lane in (known := self.of(model)).mix.shares:
            known.credit.ready_at[lane] = at

    def discarded(self, model: str, lane: str, at: float, why: str) -> None:
        """Note that what was ready of `lane` for `model` is discarded, for the reason `why`."""
        if why not in OTHERS_DOING and lane in (known := self.of(model)).mix.shares:
            known.credit.discards(lane, at)

    def leased(self, model: str, lanes: Sequence[str]) -> None:
        """`model` has groups of these lanes."""
        known = self.of(model)
        known.counts.ignored.clear()
        if known.mix.shares:
            turns = Turns(known.mix.shares, known.credit, len(lanes))
            for lane in lanes:
                turns.take(lane)
                known.credit.discarded.pop(lane, None)

    def recount(self) -> None:
        """Count anew what is open and ready, by looking through everything: it may count for another model."""
        for one in self.table.values():
            one.counts = OpenCounts(one.mix.group_size or self.group_size, one.counts.ignored, one.counts.silent)
        for episode in self._awaited():
            self.opens(episode, 1)
        for model, name in self._queues.ready():
            self.of(model).counts.waits(self._episodes[name].group_key, 1)

    def _awaited(self) -> Iterator[Episode]:
        """List the episodes that are open or sealed, and for which a group waits."""
        return (one for one in self._episodes.values() if one.state in ("open", "sealed") and one.awaited)

    def size_groups(self) -> None:
        """The groups of each model have the size of its mix, else that with which the proxy was started."""
        sizes = {model: one.mix.group_size or self.group_size for model, one in self.table.items()}
        size = sizes.pop("")
        if (size, sizes) != (self._queues.group_size, self._queues.sizes):
            self._queues.arrange(size, sizes)

    # -- events

    def _set(self, event: ev.MixSet) -> None:
        self.orders += 1
        new = event.model not in self.table
        known = self.table.setdefault(event.model, LaneMix())
        if event.shares != known.mix.shares:
            known.since, known.credit = event.at, QueueCredit()
        known.mix = Mix(event.shares, event.ahead, event.group_size, event.lane_wait_s)
        self.size_groups()
        if new:
            self.recount()
        else:
            known.counts.arrange(known.mix.group_size or self.group_size)

    def _announced(self, event: ev.PolicyAnnounced) -> None:
        """The first model that is announced has the mix that was there before. This listener comes after the weights
        know the model."""
        if (models := self._weights.models()) != self.models:
            self.table.setdefault(event.model, self._new() if self.models else self.table.pop(""))
            self.table.setdefault("", self._new())
            self.models = models
            self.size_groups()
            self.recount()

    def _new(self) -> LaneMix:
        return LaneMix(counts=OpenCounts(self.group_size))

    def _lanes_lacking(self, event: ev.LanesLacking) -> None:
        counts = self.table[event.model].counts
        for episode in self._awaited():
            counted = episode.id not in counts.silent and self.counts_for(event.model, episode)
            if counted and episode.group_key.lane in event.lanes:
                counts.plays(episode.group_key, -1)
                counts.silent.add(episode.id)
        counts.ignore(event.lanes)

    def _started(self, event: ev.ProxyStarted) -> None:
        self.group_size = event.group_size
        self.size_groups()
        for one in self.table.values():
            one.counts.arrange(one.mix.group_size or event.group_size)
            one.since = event.at
            one.credit.restart()
