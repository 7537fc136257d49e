"""The daemon's state as a fold over events: `State.apply` and what it keeps. It decides nothing and refuses nothing.

Invariant: the state is a function of the sequence of events, so a replay of the journal is the live state. After every
event, ``opened = open + sealed + ready + leased + trained + recorded + discarded``. All counters are kept as the events
come, so that reading them costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from ajet_proxy.core.conversation.history import Beginnings, Lineage
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.attempts import AWAY, NOT_SENT, Attempt, Fate, fate
from ajet_proxy.core.ledger.births import Births
from ajet_proxy.core.ledger.clients import Clients
from ajet_proxy.core.ledger.episode import Asked, CallEntry, Episode
from ajet_proxy.core.ledger.evaluations import Evaluation
from ajet_proxy.core.ledger.mix import LaneMix, Mix, QueueCredit
from ajet_proxy.core.ledger.plays import Key, Play
from ajet_proxy.core.ledger.progress import GroupKey, OpenCounts, Progress
from ajet_proxy.core.ledger.queues import LeasedBatch, ReadyQueues
from ajet_proxy.core.ledger.reward_curves import RewardCurves
from ajet_proxy.core.ledger.runs import WantedRun
from ajet_proxy.core.ledger.session_names import NAME_RUNS
from ajet_proxy.core.ledger.shares import NO_SIGNAL, STALE, Shares
from ajet_proxy.core.ledger.teams import Team, join, moved
from ajet_proxy.core.ledger.trainers import Trainer
from ajet_proxy.core.trajectory.drift_rate import Drift, by_model
from ajet_proxy.core.trajectory.rewards import EpisodeReward
from ajet_proxy.core.trajectory.timeline import POLICIES, Policy
from ajet_sdk.errors import NotFound
from ajet_sdk.routes import EPISODE_STATES

GateState = Literal["open", "closing", "closed"]
OTHER_RUN = "another run of the model has sampled some of it"


MOST_SHARED = 10_000
MOST_SEALED = 1000
"""Sealed episodes of which it is remembered how they would go on, the latest."""
"""Names that were those of several runs, the latest."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """What the operator decides. Timeouts are in seconds; `group_size` is for leases that name no size."""

    idle_timeout: float = 1800.0
    wall_timeout: float = 86400.0
    merge_policy: str = "strict"
    group_size: int = 8
    member_wait: float = 4.0
    """An open episode is waited for so many times as long as the slowest other of its group took."""


class Archive(Protocol):
    """Where ended episodes are read once they have left memory (see `ajet_proxy.core.ledger.retention`)."""

    def episode(self, name: str) -> Episode | None: ...

    def batch(self, name: str) -> LeasedBatch | None: ...

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterable[Episode]:
        """The heads of `limit` episodes that were archived before the episode `before`, the latest first."""


@dataclass(frozen=True, slots=True)
class Gate:
    """While it is shut, requests for a model wait so that its weights can change. Only its trainer moves it. It stays
    shut over a restart of the proxy, because the weights may be half written. ``since`` is when it was last moved, in
    Unix seconds; ``reason`` is why the trainer closed it, in its own words."""

    shut: bool = False
    since: float = 0.0
    reason: str | None = None
    stood: float = 0.0
    """For how long it was shut in all until then, in seconds."""

    def turned(self, shut: bool, at: float, reason: str | None = None) -> Gate:
        """The gate once it is shut, or open, from `at` on."""
        return Gate(shut, at, reason, self.stood_at(at))

    def stood_at(self, at: float) -> float:
        """For how long it has been shut in all until `at`, in seconds."""
        return self.stood + (max(0.0, at - self.since) if self.shut else 0.0)

    def moved(self, back: float) -> Gate:
        """The same gate by a clock that went `back` so many seconds (0 or below)."""
        return Gate(self.shut, self.since + back if self.since else 0.0, self.reason, self.stood)


class Served(Struct, frozen=True):
    """The weights and engines of one model, as the trainer announced them."""

    version: int
    upstreams: tuple[str, ...]


class Serving:
    """Which weights and engines serve: in the ledger's process, and as a worker knows it. ``policy_updates`` counts the
    events that may have changed a `policy_version`."""

    __slots__ = ()
    served: Mapping[str, Served]
    default_version: int
    policy_updates: int
    merge_policy: Policy

    def policy_version(self, model: str) -> int:
        """The version that serves `model`; if `model` was not announced, the one that last opened the gate."""
        served = self.served.get(model)
        return self.default_version if served is None else served.version

    def upstreams(self, model: str) -> tuple[str, ...]:
        """The engines announced for `model`."""
        served = self.served.get(model)
        return () if served is None else served.upstreams

    def models(self) -> tuple[str, ...]:
        """Every model that was announced."""
        return tuple(self.served)


class State(Serving, Shares):
    """Everything the daemon remembers. Read it freely; only `apply` changes it.

    An archived episode is not part of the state. It stays in ``leaving`` until it is known to be in the archive
    (`arrived`), so that `find` always finds it.
    """

    def __init__(self, settings: LedgerSettings, archive: Archive | None = None) -> None:
        self.settings = settings
        self.archive = archive
        self.now = self.stopped_s = 0.0
        """The time, and for how long the proxy has not run."""
        self.merge_policy: Policy = "strict"
        self.group_size = settings.group_size
        self.episodes: dict[str, Episode] = {}
        self.unsettled: dict[str, Episode] = {}  # open or sealed
        self.finished: dict[str, int] = {}
        """Those that ended, in that order, and the size of their text."""
        self.leaving: dict[str, Episode] = {}
        self.leaving_batches: dict[str, LeasedBatch] = {}
        self.opened = 0
        self.archived: Counter[str] = Counter()
        self.counts: Counter[str] = Counter(dict.fromkeys(EPISODE_STATES, 0))
        self.discarded: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(prompt=0, sampled=0, merged=0, generated=0)
        """Of settled episodes, and ``generated``: what calls sampled that ended at all, as they ended."""
        self.drift: Counter[str] = Counter()
        self.drifts: dict[str, Drift] = {}
        self.calls: Counter[str] = Counter(running=0, complete=0, lost=0)
        self.captures: Counter[str] = Counter()
        """How calls ended: ``complete``, or why they were lost first. A whole one that is lost later counts as both."""
        self.episode_by_call: dict[str, str] = {}
        self.unsent: set[str] = set()
        """Complete calls of which it is not known yet that their client was sent the end."""
        self.queues = ReadyQueues(self.group_size)
        self.batches: dict[str, LeasedBatch] = {}
        self.leased: dict[str, LeasedBatch] = {}
        self.leases = 0
        self._serve_nothing()
        self.state_changes = 0
        self.orders = 0
        """How often it was said what is leased: the mix, and what nothing more is waited for."""
        self.gate_now = Gate()
        """The gate that was moved without naming a model. All requests pass it."""
        self.gates: dict[str, Gate] = {}
        self.running: Counter[str] = Counter()
        """How many calls of each model are in flight, if any are."""
        self.lineage, self.sealed_lineage = Lineage(), Lineage()  # of open episodes, and sealed ones that a body names
        self.shared_names: dict[str, None] = {}  # by the ids of their first episodes
        self.reward_curves = RewardCurves()
        self.evaluations: dict[str, Evaluation] = {}
        """The latest of each model."""
        self.progress = Progress()
        self.mix = Mix()
        self.open_counts = OpenCounts(settings.group_size)
        self.own: dict[str, LaneMix] = {}
        """Of models with a mix of their own; `mix` and `counts` are those of all others."""
        self.credits: dict[str, QueueCredit] = {}
        """Of each model of which something was ready since the shares were set."""
        self.waits_since = 0.0
        """When the shares of `mix` were set, or the proxy started after that: lanes are waited for from then on."""
        self.plays: dict[Key, Play] = {}
        self.plays_begun = 0
        self.clients = Clients()
        self.runs: dict[str, WantedRun] = {}
        self._handlers = self._table() | self._of_trainers()

    def _serve_nothing(self) -> None:
        """What is known of weights at first."""
        self.served: dict[str, Served] = {}
        self.births: dict[str, Births] = {}
        """Of each model that was announced, or has sampled anything."""
        self.trainers: dict[str, Trainer] = {}
        """The latest of each model."""
        self.default_version = self.policy_updates = 0
        self.teams: list[Team] = []

    def _table(self) -> dict[type[Any], Callable[[Any], None]]:
        """Which method takes which event."""
        return {
            ev.EpisodeOpened: self._opened,
            ev.TaskNamed: self._task_named,
            ev.EpisodeMarkedEval: self._marked_eval,
            ev.CallStarted: self._call_started,
            ev.CallFinished: self._call_finished,
            ev.CallLost: self._call_lost,
            ev.RequestLost: self._request_lost,
            ev.AnswersSent: self._answers_sent,
            ev.RewardGiven: self._rewarded,
            ev.EpisodeSealed: self._sealed,
            ev.EpisodeDiscarded: self._discarded,
            ev.EpisodeTouched: self._touched,
            ev.EpisodesLate: self._late,
            ev.BatchLeased: self._leased,
            ev.LeaseExtended: self._extended,
            ev.BatchReturned: self._returned,
            ev.BatchTrained: self._trained,
            ev.EpisodesArchived: self._archived,
            ev.PolicyAnnounced: self._announced,
            ev.EvaluationWanted: self._evaluation_wanted,
            ev.MixSet: self._mix_set,
            ev.GroupsFlushed: self._flushed,
            ev.LanesLacking: self._lanes_lacking,
            ev.PlayBegun: self._play_begun,
            ev.PlayEnded: self._play_ended,
            ev.RunWanted: self._run_wanted,
            ev.RunForgotten: self._run_forgotten,
            ev.GateClosed: self._gate_closed,
            ev.GateOpened: self._gate_opened,
            ev.ClientJoined: self._client_joined,
            ev.ClientGone: self._client_gone,
            ev.NameShared: self._name_shared,
            ev.ProxyStarted: self._started,
        }

    def _of_trainers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            ev.TrainerCame: self._trainer_came, ev.TrainerLeft: self._trainer_left, ev.RunBegan: self._run_began,
        }

    def apply(self, event: ev.Event) -> None:
        """Take `event` as having happened. Time never runs backwards, except over a restart."""
        self._handlers[type(event)](event)
        if not isinstance(event, ev.ProxyStarted):
            self.now = max(self.now, event.at)

    def find(self, episode: str) -> Episode | None:
        """`episode`, wherever it is by now; None if there is none."""
        known = self.episodes.get(episode) or self.leaving.get(episode)
        if known is None and self.archived and self.archive is not None:
            return self.archive.episode(episode)
        return known

    def episode(self, episode: str) -> Episode:
        """`episode`, wherever it is by now, or `NotFound`."""
        known = self.find(episode)
        if known is None:
            raise NotFound(f"no episode {episode}", code="unknown_episode")
        return known

    def batch(self, batch: str) -> LeasedBatch:
        """`batch`, wherever it is by now, or `NotFound`."""
        known = self.batches.get(batch) or self.leaving_batches.get(batch)
        if known is None and self.archive is not None:
            known = self.archive.batch(batch)
        if known is None:
            raise NotFound(f"no batch {batch}", code="unknown_batch")
        return known

    def continued(
        self, history: Beginnings | None, *, body_hash: str, idempotency_key: str | None, retries: int
    ) -> tuple[str, ...]:
        """The open episode that an unnamed request continues, if there is one; several if nobody can say which of
        them."""
        again = self.lineage.repeated(body_hash if retries else None, idempotency_key, self._all_lost)
        if again is not None:
            return (again,)
        return () if history is None else self.lineage.continued(history)

    def _all_lost(self, episode: str) -> bool:
        """Whether no call of `episode`, which is in memory, has come to anything."""
        return all(entry.state == "lost" for entry in self.episodes[episode].calls.values())

    def shut(self) -> set[str]:
        """Whose gates are shut; "" is the one that was closed without naming a model."""
        own = {model for model, gate in self.gates.items() if gate.shut}
        return own | {""} if self.gate_now.shut else own

    def meant(self, model: str) -> tuple[str, ...]:
        """Whose gates open for `model`: with its own also the one without a name, if no other model is announced. Who
        names none means the only one; all of them, if none is announced."""
        if model:
            return (model,) if self.served.keys() - {model} else ("", model)
        return "", *(filter(None, [self.only_model()]) if self.served else self.gates)

    def gate_of(self, *models: str) -> Gate:
        """What holds requests of `models` (none: of any model). If nothing does, the gate that was moved last."""
        gates = [self.gate_now, *(gate for model, gate in self.gates.items() if not models or model in models)]
        return next((gate for gate in gates if gate.shut), max(gates, key=lambda gate: gate.since))

    def gate_over(self, episode: Episode) -> Gate:
        """What may hold requests of an episode: the gates of the models that it plays; any, if nobody can say which
        these are."""
        plays = episode.plays_models()
        return self.gate_of(*(plays if plays <= self.served.keys() else ()))

    def gate_state(self, model: str) -> GateState:
        """How requests of an announced model find the gate. ``closing``: closed to newcomers while calls are still in
        flight; ``closed``: nothing is in flight."""
        if not self.gate_of(model).shut:
            return "open"
        return "closing" if self.in_flight(model) else "closed"

    @property
    def gate(self) -> GateState:
        """The same of all gates together: ``closing`` if any is, else ``closed`` if any is."""
        shut = self.shut()
        if not shut:
            return "open"
        return "closing" if any(self.in_flight(model) for model in shut) else "closed"

    def stood(self, model: str, at: float) -> float:
        """For how many seconds nobody could play `model`, until `at`: its gates were shut, or the proxy did not run."""
        own = self.gates.get(model)
        return self.stopped_s + self.gate_now.stood_at(at) + (0.0 if own is None else own.stood_at(at))

    def in_flight(self, model: str) -> int:
        """How many calls the gate of `model` waits for, as far as the ledger knows: all, if it is the only one."""
        return self.calls["running"] if "" in self.meant(model) else self.running[model]

    def only_model(self) -> str:
        """The model that a request means if it names none: the only one that was announced, else ""."""
        return next(iter(self.served)) if len(self.served) == 1 else ""

    def evaluation(self, name: str | None) -> Evaluation | None:
        """The evaluation called `name`, as long as it is the latest of its model."""
        return next((one for one in self.evaluations.values() if one.id == name), None)

    def play(self, tenant: str, name: str) -> Play:
        """The play of `tenant` called `name`, or `NotFound`."""
        known = self.plays.get((tenant, name))
        if known is None:
            raise NotFound(f"no play {name}: it is whole, was given up, or never began", code="unknown_play")
        return known

    def wanted(self) -> dict[str, int]:
        """How many evaluation episodes of each model are still to be opened now, where any are. What another version
        would play is wanted no more, nor what one would play that was made again."""
        return {
            one.model: one.missing for one in self.evaluations.values()
            if one.missing > 0 and one.policy_version == self.policy_version(one.model)
            and one.branch == self.born(one.model).last
        }

    def directed(self, model: str) -> LaneMix:
        """The mix that holds for `model`: its own, or that of all models that have none."""
        return self.own.get(model) or LaneMix(self.mix, self.open_counts, self.waits_since)

    def directions(self, models: Iterable[str]) -> list[LaneMix]:
        """The mixes of `models`, each once; without any, the one that has no name."""
        names = dict.fromkeys(model if model in self.own else "" for model in models) or ("",)
        return [self.directed(name) for name in names]

    def may_train(
        self, model: str | None, members: Mapping[str, str] | None, teachers: Mapping[str, str] | None
    ) -> tuple[str, ...]:
        """The models that an episode may train which is opened so: those that are announced of its members, if any is;
        its own; else whichever is announced. A teacher's it does not train."""
        named = tuple(dict.fromkeys(members.values() if members else filter(None, (model,))))
        return tuple(one for one in named if one in self.served) or named or tuple(
            one for one in self.served if one not in (teachers or {}).values()
        )

    def room(self, lane: str, models: Iterable[str] = ()) -> int | None:
        """How many more episodes of `lane` that may train `models` may be opened now; None: any number. There is room
        as long as any of them has some: the slower ones of a team hold up nobody."""
        rooms = [one.room(lane, self.settings.group_size) for one in self.directions(models)]
        return max(0 if room is None else room for room in rooms) if None not in rooms else None

    def paced(self) -> bool:
        """Whether any lane may be full."""
        return any(mix.ahead is not None for mix in (self.mix, *(one.mix for one in self.own.values())))

    def lacking(self, group_key: GroupKey, models: Iterable[str] = ()) -> int:
        """How many episodes the group lacks, of any of `models`, that was begun in a group key."""
        return max(one.counts.lacking(group_key) for one in self.directions(models))

    def whose_mix(self) -> str:
        """Whose mix is meant where no model is named: that of the only one that is announced, if it has its own."""
        return self.only_model() if self.only_model() in self.own else ""

    def regroup(self) -> None:
        """Count groups by the sizes that hold now: that of the settings, and that of the mix."""
        self._size_groups(anew=True)
        self.progress.arrange()
        self._recount(self.settings.group_size)

    def _size_groups(self, anew: bool = False) -> None:
        """The groups of each model have the size of its mix, else that with which the proxy was started."""
        own = self.group_size
        sizes = {model: one.mix.group_size or own for model, one in self.own.items()}
        size = self.mix.group_size or own
        if anew or (size, sizes) != (self.queues.group_size, self.queues.sizes):
            self.queues.arrange(size, sizes)

    def leasable(self) -> object:
        """A value that stays equal as long as no lease can find anything new."""
        return self.queues.changes, self.state_changes, self.policy_updates, self.orders

    def alerts(self) -> dict[str, str]:
        """What an operator should look at, by subject."""
        lines = {f"drift of model {model!r}": drift.alert(model) for model, drift in self.drifts.items()}
        for model in sorted(self.queues.models()) if self.served else ():
            if model not in self.served:
                line = f"episodes wait for a trainer of model {model!r}, and none has announced it"
                lines[f"trainer of {model!r}"] = line
        if self.shared_names:
            *_, latest = self.shared_names
            lines["shared names"] = (
                f"{latest!r} (of {len(self.shared_names)}) was the name of several runs, so the history of each call "
                f"tells its episode: {NAME_RUNS}"
            )
        return {about: line for about, line in lines.items() if line is not None}

    def arrived(self, episodes: Iterable[str], batches: Iterable[str]) -> None:
        """These episodes and batches are in the archive now."""
        for name in episodes:
            del self.leaving[name]
        for name in batches:
            del self.leaving_batches[name]

    def _opened(self, event: ev.EpisodeOpened) -> None:
        episode = Episode(
            id=event.episode, task=event.task, model=event.model, agent=event.agent, eval=event.eval,
            opened_at=event.at, idle_timeout=event.idle_timeout, wall_timeout=event.wall_timeout, tenant=event.tenant,
            identified_by=event.identified_by, metadata=event.metadata, members=event.members, active_at=event.at,
            evaluation=event.evaluation, client=event.client, revision=event.revision, given_lane=event.lane,
            play=event.play, place=event.place, teachers=event.teachers, number=self.opened,
        )
        if event.play is not None and event.place is not None:
            play = self.plays[event.tenant, event.play]
            episode.play_number = play.number
            play.begin(event.place)
        if (evaluation := self.evaluation(event.evaluation)) is not None:
            evaluation.begin(event.episode)
        episode.may_train = self.may_train(event.model, event.members, event.teachers)
        if not episode.eval:
            self.progress.opened(GroupKey.of(episode), event.at)
            self._opens(episode, 1)
            self._sits(episode, event.at)
        self.episodes[event.episode] = self.unsettled[event.episode] = episode
        if episode.client is not None:
            self.clients.opened(episode.client, episode)
        self.counts["open"] += 1
        self.opened += 1

    def _task_named(self, event: ev.TaskNamed) -> None:
        episode, before = self.episodes[event.episode], GroupKey.of(self.episodes[event.episode])
        if event.derived and episode.task is not None:
            return
        if not episode.eval:
            self._rises(episode)
        if episode.awaited:
            self._opens(episode, -1)
        episode.task, episode.task_derived = event.task, event.derived
        if episode.awaited:
            self.progress.opened(GroupKey.of(episode), episode.opened_at)
            self.progress.settled(before)
            self._opens(episode, 1)
        if not episode.eval:
            self._sits(episode, event.at)

    def _opens(self, episode: Episode, change: int) -> None:
        """`episode`, which a group waits for, is open or sealed (1), or no more (-1)."""
        for one in self.directions(episode.may_train):
            one.counts.plays(GroupKey.of(episode), change)

    def _marked_eval(self, event: ev.EpisodeMarkedEval) -> None:
        episode = self.episodes[event.episode]
        self._rises(episode)
        if episode.awaited:
            self.progress.settled(GroupKey.of(episode))
            self._opens(episode, -1)
        episode.eval = True

    def _late(self, event: ev.EpisodesLate) -> None:
        self.orders += 1
        for episode in map(self.episodes.__getitem__, event.episodes):
            self.progress.settled(GroupKey.of(episode))
            self._opens(episode, -1)
            episode.late = True
            for model in episode.may_train:
                self.queues.late(model, GroupKey.of(episode), episode.id)

    def _call_started(self, event: ev.CallStarted) -> None:
        episode = self.episodes[event.episode]
        episode.active_at = event.at
        known = episode.named_to_train()
        number = episode.attempts.begin(event.said, event.agent, event.model, len(event.calls), event.at)
        asked = Asked(
            event.at, event.model, event.agent, event.identified_by, event.body_hash, event.idempotency_key,
            event.retries, event.said, number, self.policy_updates,
        )
        for call in event.calls:
            episode.calls[call] = CallEntry(asked)
            self.episode_by_call[call] = episode.id
        if not known and (may_train := episode.named_to_train()) and may_train != episode.may_train:
            self._train_else(episode, may_train, event.at)
        if event.identified_by == "lineage":
            self.lineage.add_request(episode.id, event.body_hash, event.idempotency_key)
        episode.running += len(event.calls)
        self.calls["running"] += len(event.calls)
        self.running[event.model] += len(event.calls)

    def _train_else(self, episode: Episode, may_train: tuple[str, ...], at: float) -> None:
        """A call has told what it trains, which nothing had said before."""
        if not episode.eval:
            self._rises(episode)
        if episode.awaited:
            self._opens(episode, -1)
        episode.may_train = may_train
        if episode.awaited:
            self._opens(episode, 1)
        if not episode.eval:
            self._sits(episode, at)

    def _call_finished(self, event: ev.CallFinished) -> None:
        episode, turn = self.episodes[event.episode], event.call.turn
        entry = episode.calls[turn.call]
        episode.finish(entry, event.call)
        born, shut = self.births.setdefault(turn.model, Births()), self.gate_of(turn.model).shut
        entry.branches, entry.ahead = born.sampled(turn, entry.asked.updates, shut=shut)
        self.tokens["generated"] += turn.sampled
        if episode.state == "open":
            self.lineage.add(episode.id, event.marks)
        self._attempt_ended(episode, entry, "answered", event)
        self.unsent.add(turn.call)
        self._call_ended(episode, entry, "complete", event.at)

    def _call_lost(self, event: ev.CallLost) -> None:
        episode = self.episodes[event.episode]
        entry = episode.calls[event.call]
        self.unsent.discard(event.call)
        came = fate(event.reason, status=event.status, told=bool(event.marks))
        self._attempt_ended(episode, entry, came, event)
        entry.turn, entry.reason = None, event.reason
        if episode.state == "open":
            self.lineage.add(episode.id, event.marks)
        self._call_ended(episode, entry, "lost", event.at)

    def _attempt_ended(
        self, episode: Episode, entry: CallEntry, came: Fate, event: ev.CallFinished | ev.CallLost
    ) -> None:
        """Note what became of a call that was in flight, or complete and its client was not sent the end after all."""
        attempts, asked, known = episode.attempts, entry.asked, None
        if episode.state not in ("open", "sealed"):
            return
        if entry.state == "running":
            known = attempts.end(asked.number)
        elif isinstance(event, ev.CallLost) and event.reason in NOT_SENT[entry.state]:
            attempts.take_back(asked.number)
        else:
            return
        if came == "answered":
            attempts.answer(asked.number, asked.agent, event.begins)
        elif came == "world" and isinstance(event, ev.CallLost):
            attempts.lose(Attempt(
                asked.agent, asked.said, asked.number, event.at, asked.model, reason=event.reason, call=event.call,
                detail=f"the engine answered {event.status}" if event.status else None,
                answered_by=[] if known is None else [*known.answered_by],
            ))

    def _request_lost(self, event: ev.RequestLost) -> None:
        attempts = self.episodes[event.episode].attempts
        attempts.lose(Attempt(
            event.agent, event.said, attempts.begun, event.at, event.model, reason=event.reason, detail=event.detail
        ))

    def _answers_sent(self, event: ev.AnswersSent) -> None:
        self.unsent.difference_update(event.calls)
        self._doubt(self.unsent.intersection(event.unknown))

    def _doubt(self, calls: Iterable[str]) -> None:
        """Nobody can know whether the clients of `calls` were sent the end of their answers."""
        for call in calls:
            self.episodes[self.episode_by_call[call]].calls[call].doubtful = True
            self.unsent.discard(call)

    def _call_ended(self, episode: Episode, entry: CallEntry, state: str, at: float) -> None:
        if entry.state != state:
            self.captures[entry.reason or state] += 1
        self.calls[entry.state] -= 1
        self.calls[state] += 1
        if entry.state == "running":
            episode.running -= 1
            self.running[entry.asked.model] -= 1
            if not self.running[entry.asked.model]:
                del self.running[entry.asked.model]
        entry.state = state
        episode.active_at = at
        self._settle(episode, at)

    def _rewarded(self, event: ev.RewardGiven) -> None:
        episode = self.episodes[event.episode]
        episode.active_at = event.at
        before = episode.reward()
        episode.rewards[event.id] = EpisodeReward(
            event.id, event.value, event.call, event.agent, event.final, event.note, event.at, event.state,
            event.model,
        )
        if episode.state in ("ready", "recorded"):
            self._count(episode, before, event.at)
            self._evaluated(episode)

    def _sealed(self, event: ev.EpisodeSealed) -> None:
        episode = self.episodes[event.episode]
        episode.sealed_at = event.at
        if episode.identified_by == "body":
            self.lineage.hand_over(episode.id, self.sealed_lineage, MOST_SEALED)
        self._move(episode, "sealed", event.at)
        self._settle(episode, event.at)

    def _settle(self, episode: Episode, at: float) -> None:
        """A sealed episode with nothing in flight takes its next state by itself."""
        if episode.state != "sealed" or episode.running:
            return
        timelines = episode.keep_timelines(self.merge_policy)
        for timeline in timelines:
            whole = sum(turn.end for turn in timeline.turns)
            sampled = sum(turn.sampled for turn in timeline.turns)
            self.tokens.update(prompt=whole - sampled, sampled=sampled, merged=whole - len(timeline))
            if timeline.broken_by is not None:
                self.drift[timeline.broken_by] += 1
        for model, (turns, broken) in by_model(timelines).items():
            self.drifts.setdefault(model, Drift()).add(turns, broken)
        state, reason = episode.outcome()
        detail = episode.losses() if reason == "incomplete_call" else None
        if state == "ready":
            models = episode.trains()
            own = [model for model in models if self.born(model).own(episode.sampled_by(model).values())]
            episode.learned |= {model: f"other_run: {OTHER_RUN}" for model in models if model not in own}
            if own:
                self._rises(episode, but=own)
            episode.shares = dict.fromkeys(own)
            for model in own:
                self._queue(episode, model, at)
            join(self.teams, own)
            if not own:
                state, reason, detail = "discarded", "other_run", OTHER_RUN
        episode.attempts.settle()
        if reason == "incomplete_call" and episode.attempts.unanswered():
            episode.cause = "infra"
        self._move(episode, state, at, reason, detail)
        if state != "discarded":
            self._count(episode, None, at)

    def _count(self, episode: Episode, before: float | None, at: float) -> None:
        """Counts a settled episode in the curves once, as soon as it has a reward; later rewards correct it."""
        reward, kind = episode.reward(), "eval" if episode.eval else "train"
        if reward is None:
            return
        if episode.client is not None:
            self.clients.rewarded(episode.client, reward, before)
        if episode.reward_number is None or before is None:
            version = max((version for turn in episode.turns() for version, _ in turn.policy_versions), default=0)
            episode.reward_number = self.reward_curves.add(
                kind, episode.id, episode.named_task, reward, at=at, version=version
            )
        else:
            self.reward_curves.correct(kind, episode.reward_number, episode.id, episode.named_task, reward, before)

    def _discarded(self, event: ev.EpisodeDiscarded) -> None:
        episode, cut = self.episodes[event.episode], event.reason == STALE or event.detail == NO_SIGNAL
        for model in event.models:
            episode.learned[model] = f"{event.reason}: {event.detail}"
            self._filtered(episode, model, event.reason, event.at, cut)
        if not event.models:
            for model in [model for model, share in episode.shares.items() if share is None]:
                self._drop(episode, model, event.at, event.reason, cut)
            episode.keep_timelines(self.merge_policy)
            episode.attempts.settle()
            episode.cause = event.cause
            self._move(episode, "discarded", event.at, event.reason, event.detail)

    def _touched(self, event: ev.EpisodeTouched) -> None:
        self.episodes[event.episode].active_at = event.at

    def _archived(self, event: ev.EpisodesArchived) -> None:
        for name in event.episodes:
            episode = self.leaving[name] = self.episodes.pop(name)
            episode.stored = "archive"
            self.archived[episode.state] += 1
            del self.finished[name]
            for call in episode.calls:
                del self.episode_by_call[call]
                self.unsent.discard(call)
        for name in event.batches:
            self.leaving_batches[name] = self.batches.pop(name)

    def _announced(self, event: ev.PolicyAnnounced) -> None:
        known = self.served.get(event.model, Served(event.version, ()))
        upstreams = known.upstreams if event.upstreams is None else event.upstreams
        self.policy_updates += 1
        self._serves(event.model, known.version, Served(event.version, upstreams))

    def _serves(self, model: str, before: int, served: Served) -> None:
        """`model` has these weights. Where they begin a branch, all that waits is of another age by that."""
        self.served[model] = served
        born = self.births.setdefault(model, Births())
        moved(self.teams, model, before, served.version, anew=not born.announced)
        if born.serves(served.version, self.policy_updates):
            self.queues.age(model, lambda name: self.oldest(self.episodes[name], model))

    def _trainer_came(self, event: ev.TrainerCame) -> None:
        self.trainers[event.model] = Trainer(event.run, event.instance, event.host, event.folder, event.at)

    def _trainer_left(self, event: ev.TrainerLeft) -> None:
        self.trainers[event.model].left = True

    def _run_began(self, event: ev.RunBegan) -> None:
        self.policy_updates += 1
        births = self.births.setdefault(event.model, Births())
        if births.run not in ("", event.run):
            self.queues.part(event.model)
        births.begin(event.run, self.policy_updates)
        if (trainer := self.trainers.get(event.model)) is not None:
            trainer.begun = trainer.run == event.run

    def _evaluation_wanted(self, event: ev.EvaluationWanted) -> None:
        self.evaluations[event.model] = Evaluation(
            event.evaluation, event.model, event.policy_version, event.episodes, branch=self.born(event.model).last
        )

    def _mix_set(self, event: ev.MixSet) -> None:
        self.orders += 1
        before, new = self.directed(event.model), event.model and event.model not in self.own
        since, mix = before.since, Mix(event.shares, event.ahead, event.group_size, event.lane_wait_s)
        if event.shares != before.mix.shares:
            since = event.at
            self.credits = {
                model: one for model, one in self.credits.items()
                if (model != event.model if event.model else model in self.own)
            }
        if event.model:
            self.own[event.model] = LaneMix(mix, OpenCounts() if new else before.counts, since)
        else:
            self.mix, self.waits_since = mix, since
        self._size_groups()
        if new:
            self._recount(self.settings.group_size)
        else:
            self.directed(event.model).arrange(self.settings.group_size)

    def _flushed(self, event: ev.GroupsFlushed) -> None:
        self.orders += 1
        self.progress.flush(event.lane, event.task)

    def _lanes_lacking(self, event: ev.LanesLacking) -> None:
        self.directed(event.model).counts.ignore(event.lanes)

    def _play_begun(self, event: ev.PlayBegun) -> None:
        self.plays[event.tenant, event.play] = Play(event.tenant, event.play, event.episodes, self.plays_begun)
        self.plays_begun += 1

    def _play_ended(self, event: ev.PlayEnded) -> None:
        del self.plays[event.tenant, event.play]

    def _run_wanted(self, event: ev.RunWanted) -> None:
        self.runs[event.run] = WantedRun(
            event.run, event.supervisor, event.desired, event.config, event.digest, event.starts, event.at
        )

    def _run_forgotten(self, event: ev.RunForgotten) -> None:
        del self.runs[event.run]

    def _gate_closed(self, event: ev.GateClosed) -> None:
        known = self.gates.get(event.model, Gate()) if event.model else self.gate_now
        gate = known if known.shut else known.turned(True, event.at, event.reason)
        if event.model:
            self.gates[event.model] = gate
        else:
            self.gate_now = gate

    def _gate_opened(self, event: ev.GateOpened) -> None:
        """Without a name, the version is that of the only model: with several, only `PolicyAnnounced` says whose."""
        meant, model = self.meant(event.model), event.model or self.only_model()
        self.policy_updates += 1
        if "" in meant:
            self.default_version = event.policy_version
            self.gate_now = self.gate_now.turned(False, event.at) if self.gate_now.shut else self.gate_now
        if model in self.served:
            known, served = self.served[model], Served(event.policy_version, self.served[model].upstreams)
            if self.born(model).announced:
                self._serves(model, known.version, served)
            else:  # whose weights these are, only an announcement tells
                self.served[model] = served
        shut = {name: self.gates[name] for name in meant if self.gates.get(name, Gate()).shut}
        self.gates.update({name: gate.turned(False, event.at) for name, gate in shut.items()})

    def _client_joined(self, event: ev.ClientJoined) -> None:
        self.clients.joined(event)

    def _name_shared(self, event: ev.NameShared) -> None:
        self.shared_names.pop(event.name, None)
        self.shared_names[event.name] = None
        if len(self.shared_names) > MOST_SHARED:
            del self.shared_names[next(iter(self.shared_names))]

    def _client_gone(self, event: ev.ClientGone) -> None:
        self.clients.left(event)

    def _started(self, event: ev.ProxyStarted) -> None:
        """Clocks begin anew, since nobody could show a sign of life during the stop. If the machine's clock went back
        in the meantime, times counted from its old reading move with it. Nobody knows who was sent an answer."""
        before, back = self.now, min(event.at - self.now, 0.0)
        self.stopped_s += max(event.at - before, 0.0) if before else 0.0
        self.now = event.at
        self.merge_policy = next(policy for policy in POLICIES if policy == event.merge_policy)
        self.group_size = event.group_size
        self._size_groups()
        for episode in self.unsettled.values():
            episode.active_at = event.at
            episode.opened_at += back
            if episode.state == "open":
                episode.attempts.lose(
                    Attempt(None, "", episode.attempts.begun, event.at, reason=AWAY, since=before)
                )
        for batch in self.leased.values():
            batch.lease_until += back
        self.gate_now = self.gate_now.moved(back)
        self.gates = {name: gate.moved(back) for name, gate in self.gates.items()}
        self.progress.restart(event.at)
        self.waits_since = event.at
        for own in self.own.values():
            own.since = event.at
        for credit in self.credits.values():
            credit.restart()
        self.clients.restarted(event.at, back)
        for trainer in self.trainers.values():
            trainer.heard_at = event.at
        self._doubt(tuple(self.unsent))

    def _evaluated(self, episode: Episode) -> None:
        """Tells the evaluation of `episode`, if it has one that still counts, how it stands."""
        if (evaluation := self.evaluation(episode.evaluation)) is not None:
            evaluation.moved(episode.id, episode.state, episode.reward())

    def _move(
        self, episode: Episode, state: str, at: float, reason: str | None = None, detail: str | None = None
    ) -> None:
        """Every change of state goes through here, and the counters with it."""
        self.state_changes += 1
        if not episode.eval:
            self._in_its_lane(episode, state, at)
        before = episode.state
        if episode.place is not None and episode.play is not None:
            play = self.plays.get((episode.tenant, episode.play))
            if play is not None and play.number == episode.play_number:
                play.moved(episode.place, before, state, reason)
        self.counts.update({before: -1, state: 1})
        self.lineage.drop(episode.id)
        episode.move(state, at, reason, detail)
        if episode.client is not None:
            self.clients.moved(episode.client, episode, before, at)
        if state not in ("open", "sealed"):
            self.unsettled.pop(episode.id, None)
        self._evaluated(episode)
        if reason is not None:
            self.discarded[reason] += 1
        if episode.ended_at is not None:
            for model in episode.shares:
                self.queues.forget(model, episode.id)
            self.finished[episode.id] = episode.size()

    def _in_its_lane(self, episode: Episode, state: str, at: float) -> None:
        """Tell the group keys and lanes that an episode, which no evaluation is, goes to `state`."""
        lane = episode.lane
        if state not in ("open", "sealed") and episode.state in ("open", "sealed"):
            if not episode.shares:
                self._rises(episode)
            if episode.awaited:
                self.progress.settled(GroupKey.of(episode))
                self._opens(episode, -1)
            for model in episode.shares if state == "ready" else ():
                if lane in self.directed(model).mix.shares:
                    self._standing(model).heard[lane] = at
