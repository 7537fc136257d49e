"""A ledger driven by hand: each command's events are applied, kept, and checked against what must hold after each."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count, islice
from typing import Any
from unittest import mock

from msgspec import structs

from ajet_proxy.core.conversation.history import Mark
from ajet_proxy.core.ledger import retention, views
from ajet_proxy.core.ledger.commands import CallAsked, Commands, paced
from ajet_proxy.core.ledger.episode import Episode, awaits
from ajet_proxy.core.ledger.episode import judging as judging_of
from ajet_proxy.core.ledger.episodes import Archive
from ajet_proxy.core.ledger.events import CallStarted, EpisodeOpened, Event, LanesLacking
from ajet_proxy.core.ledger.mixes import LaneMix
from ajet_proxy.core.ledger.parts import Part
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.ledger.transcript import CallEntry, Transcript
from ajet_proxy.core.trajectory.timeline import pack
from ajet_sdk.routes import (
    EPISODE_STATES,
    Abort,
    Ack,
    Attend,
    Evaluate,
    Extend,
    Feedback,
    GateClose,
    GateOpen,
    Join,
    Judgement,
    Lease,
    OpenEpisode,
    Policy,
    Reward,
    SetMix,
)
from tests.kit.strategies import make_call

SETTINGS = LedgerSettings(
    idle_timeout=100.0, wall_timeout=1000.0, group_size=2, traffic_holdout=0.3, traffic_idle=100.0, traffic_backlog=3,
)


def blank(calls: Mapping[str, CallEntry] | None = None, *, state: str = "open", **fields: Any) -> Episode:
    """An episode in `state`, with these `calls`, that was opened with these fields of an `EpisodeOpened`."""
    bare: dict[str, Any] = dict.fromkeys(("task", "model", "agent"))
    bare |= {"at": 0.0, "episode": "e", "eval": False, "idle_timeout": 1.0, "wall_timeout": 1.0}
    return Episode(EpisodeOpened(**bare | fields), state=state, transcript=Transcript({**(calls or {})}))


def picture(state: State) -> str:
    """Everything that anyone can see of `state`."""
    queues = {
        model: [asdict(queue.groups[number]) for number in sorted(queue.groups)]
        for model, queue in state.seats.queues.table.items()
    }
    batches = [
        (batch.id, batch.model, batch.groups, batch.state, batch.lease_until, batch.policy_version, batch.earlier)
        for batch in state.batches.values()
    ]
    seen: dict[str, Any] = {
        "status": views.status(state),
        "teams": state.weights.teams,
        "overview": views.overview(state, 0.0),
        "episodes": [views.record(state, episode, tokens="all") for episode in state.episodes],
        "unsettled": sorted(state.episodes.unsettled),
        "awaiting": list(state.episodes.awaiting),
        "withdrawn": list(state.episodes.withdrawn),
        "judging": [state.tallies.judging, state.tallies.judged_calls, state.tallies.unjudged_calls],
        "queues": sorted(queues.items()),
        "batches": batches,
        "leased": sorted(state.batches.leased),
        "evaluations": [one.to_json() for one in state.plays.evaluations.values()],
        "wanted": state.plays.wanted(),
        "room": views.wanted(state),
        "mixes": {name: mix_picture(known) for name, known in state.mixes.table.items()},
        "progress": sorted((key, *asdict(one).values()) for key, one in state.seats.progress.by_key.items()),
        "plays": [one.to_json() for one in state.plays.table.values()],
        "clients": [
            one.to_json(state.now, one.heard_at) for one in (*state.clients.live.values(), *state.clients.gone.values())
        ],
        "gates": {model: [gate.shut, gate.since, gate.reason] for model, gate in state.gates.table.items()},
        "runs": [structs.asdict(run) for run in state.runs.values()],
        "births": {
            model: [births.run, births.anew, list(map(asdict, births.branches))]
            for model, births in state.weights.births.items()
        },
        "trainers": {
            model: asdict(one) | {"came": structs.asdict(one.came)} for model, one in state.weights.trainers.items()
        },
    }
    return json.dumps(seen, sort_keys=True)


def mix_picture(known: LaneMix) -> list[Any]:
    counts, mix, credit = known.counts, structs.asdict(known.mix), asdict(known.credit)
    out = [counts.ignored, sorted(counts.silent)]
    return [mix, credit, known.since, counts.size, out, counts.playing, counts.waiting]


def check(state: State) -> None:
    """The ledger identity, and every counter against a slow count."""
    live, gone = list(state.episodes.values()), list(state.episodes.leaving.values())
    episodes = live + gone
    shown = {name: state.tallies.counts[name] for name in EPISODE_STATES}
    assert shown == {name: sum(episode.state == name for episode in episodes) for name in EPISODE_STATES}
    assert state.episodes.archived == Counter(episode.state for episode in gone)
    assert sum(shown.values()) == len(episodes) == state.tallies.opened
    assert {episode.stored for episode in live} <= {None}
    assert {episode.stored for episode in gone} <= {"archive"}
    assert state.episodes.finished == {one.id: one.transcript.size() for one in live if one.ended_at is not None}
    assert len(state.batches) + len(state.batches.leaving) == state.batches.leases
    assert state.episodes.by_call == {call: episode.id for episode in live for call in episode.transcript.calls}
    answers = dict[str, set[str]]()
    for turn in (turn for episode in live for turn in episode.transcript.turns() if turn.response is not None):
        answers.setdefault(str(turn.response), set()).add(turn.call)
    assert state.episodes.by_response == answers
    owners = {call: state.episodes[state.episodes.by_call[call]] for call in state.episodes.unsent}
    assert all(episode.transcript.calls[call].state == "complete" for call, episode in owners.items())
    entries = [entry for episode in episodes for entry in episode.transcript.calls.values()]
    for name in ("running", "complete", "lost"):
        assert state.tallies.calls[name] == sum(entry.state == name for entry in entries)
    assert dict(state.gates.running) == Counter(entry.asked.model for entry in entries if entry.state == "running")
    assert state.tallies.captures.total() - state.tallies.captures["complete"] == state.tallies.calls["lost"]
    assert state.tallies.captures["complete"] >= state.tallies.calls["complete"]
    for episode in episodes:
        assert episode.opening.members or episode.may_train == (episode.named_to_train() or episode.may_train)
        assert not set(episode.may_train) & set(episode.opening.teaching)
        mine = episode.transcript.calls.values()
        assert episode.transcript.running == sum(entry.state == "running" for entry in mine)
        unsettled = episode.state in ("open", "sealed") and not awaits(episode)
        assert (episode.id in state.episodes.unsettled) == unsettled
        assert not (episode.state == "sealed" and not episode.transcript.running and not awaits(episode))
        assert (episode.reason is not None) == (episode.state == "discarded")
        if episode.state in ("ready", "leased", "trained"):
            assert episode.state == episode.shares.state
    shared = [(one.id, one.shares.by_model) for one in episodes if one.state != "discarded"]
    ready = sorted((model, name) for name, own in shared for model, share in own.items() if share is None)
    assert sorted(state.seats.queues.ready()) == ready
    for model in ("m", "n"):
        aged = [(state.weights.oldest(state.episodes[name], model), name) for shown, name in ready if shown == model]
        assert state.seats.queues.of(model).older(2) == [name for oldest, name in sorted(aged) if oldest < 2]
    check_seats(state, episodes)
    assert sum(state.tallies.discarded.values()) == shown["discarded"]
    check_judging(state, episodes)
    check_progress(state, episodes)
    assert state.weights.served.keys() <= state.mixes.table.keys()
    for name in state.mixes.table:
        check_counts(state, name)
    check_clients(state, episodes)
    for model, evaluation in state.plays.evaluations.items():
        own = [one for one in episodes if one.opening.evaluation and one.play_number == evaluation.number]
        assert all(episode.opening.eval and episode.opening.model in (model, None) for episode in own)
        assert evaluation.opened - evaluation.done == sum(one.state in ("open", "sealed") for one in own)
        assert evaluation.rewards == {one.opening.place: one.reward() for one in own if one.state == "recorded"}
        assert 0 <= evaluation.missing <= evaluation.episodes


def check_judging(state: State, episodes: Sequence[Episode]) -> None:
    """Compares the counts of what awaits a judgement, and of what became of it, with a slow count."""
    for one in episodes:
        assert (one.id in state.episodes.awaiting) == awaits(one)
        assert not (one.withdrawn and (one.state == "ready" or awaits(one)))
        assert one.judgement is None or len(one.judgement.scores) <= len(one.rewards)
    judging = Counter(found for one in episodes if (found := judging_of(one)) is not None)
    assert +state.tallies.judging == judging + Counter(sealed=judging.total())
    parts = dict[str, list[str]]()
    for episode in (one for one in state.episodes.values() if one.opening.first):
        parts.setdefault(episode.opening.first, []).append(episode.id)
    assert state.episodes.parts == parts


def check_seats(state: State, episodes: Sequence[Episode]) -> None:
    """Who has a seat, and all that is counted of groups, against a slow count."""
    queues = state.seats.queues
    members = {
        (model, name, of, group.group_key): number for model, queue in queues.table.items()
        for number, group in queue.groups.items() for name, of in group.members.items()
    }
    playing = [one for one in episodes if one.state in ("open", "sealed") and not one.opening.eval]
    assert members.keys() == {
        (model, one.id, "late" if one.late else "open", one.group_key) for one in playing for model in one.may_train
    } | {(model, name, "ready", state.episodes[name].group_key) for model, name in queues.ready()}
    assert all(queues.table[model].seats[name].group == number for (model, name, _, _), number in members.items())
    assert all(queue.seats for queue in queues.table.values())
    assert all(group.members for queue in queues.table.values() for group in queue.groups.values())
    anew = copy.deepcopy(queues)
    anew.arrange(queues.group_size, queues.sizes)
    assert anew == queues


def check_progress(state: State, episodes: Sequence[Episode]) -> None:
    """Compares what is open and ready of each group key and lane with a slow count."""
    progress = state.seats.progress
    opened = Counter(one.group_key for one in episodes if one.state in ("open", "sealed") and one.awaited)
    ready = Counter(state.episodes[name].group_key for _, name in state.seats.queues.ready())
    assert {group_key: (one.open, one.ready) for group_key, one in progress.by_key.items()} == {
        group_key: (opened[group_key], ready[group_key]) for group_key in opened.keys() | ready.keys()
    }
    quiet = sorted((one.last, group_key) for group_key, one in progress.by_key.items() if one.ready and not one.open)
    flushed = {group_key for group_key, one in progress.by_key.items() if one.flushed}
    for before in (*(last for last, _ in quiet), -1.0):
        assert progress.ended(before) == {group_key for last, group_key in quiet if last <= before} | flushed


def check_counts(state: State, name: str) -> None:
    """Compares what counts for the mix of that name with a slow count."""
    counts, mix = state.mixes.table[name].counts, state.mixes.table[name].mix
    open_now = [
        one for one in state.episodes.values() if one.state in ("open", "sealed") and one.awaited
        and state.mixes.counts_for(name, one) and one.id not in counts.silent
    ]
    assert all(state.episodes[one].state in ("open", "sealed") for one in counts.silent)
    mine = [state.episodes[one] for model, one in state.seats.queues.ready() if state.mixes.name(model) == name]
    playing, waiting = Counter(one.group_key for one in open_now), Counter(one.group_key for one in mine)
    assert counts.playing == Counter(one.group_key.lane for one in open_now)
    assert counts.waiting == Counter(one.group_key.lane for one in mine)
    size = mix.group_size or state.settings.group_size
    for lane in counts.playing.keys() | counts.waiting.keys():
        left = sum(number % size for key, number in waiting.items() if key.lane == lane and not playing[key])
        assert counts.of(lane) == max(0, counts.playing[lane] + counts.waiting[lane] - left - counts.ignored[lane])
    for group_key in playing.keys() | waiting.keys():
        assert counts.lacking(group_key) == -(playing[group_key] + waiting[group_key]) % size


def check_clients(state: State, episodes: Sequence[Episode]) -> None:
    """Compares what is counted for each client with a slow count over all `episodes`."""
    clients = state.clients
    for client in (*clients.live.values(), *clients.gone.values()):
        own = [episode for episode in episodes if episode.opening.client == client.id]
        assert (client.reason is None) == (client.id in clients.live)
        assert list(client.open) == [episode.id for episode in own if episode.state == "open"]
        assert +client.counts == Counter(episode.state for episode in own)
        assert client.discarded == Counter(episode.reason for episode in own if episode.reason is not None)
        assert client.failures == Counter(episode.cause for episode in own if episode.cause is not None)
        settled = [one.reward() for one in own if one.reward_number is not None]
        assert client.rewarded == len(settled)
        assert math.isclose(client.reward_sum, sum(filter(None, settled)), abs_tol=1e-9)
        assert sum(client.revisions.values()) <= len(own)


def of_two(*, watch: bool = True) -> LedgerRig:
    """A rig with two models, both at version 1."""
    rig = LedgerRig(watch=watch)
    for model in ("m", "n"):
        rig.announce(model)
    return rig


class Shelf:
    """An archive in memory."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}
        self.batches: dict[str, LeasedBatch] = {}

    def take(self, state: State, episodes: int) -> None:
        """The first `episodes` that are leaving `state`, and all batches."""
        self.episodes |= dict(islice(state.episodes.leaving.items(), episodes))
        self.batches |= state.batches.leaving
        state.arrived(list(state.episodes.leaving)[:episodes], list(state.batches.leaving))

    def episode(self, name: str) -> Episode | None:
        return self.episodes.get(name)

    def batch(self, name: str) -> LeasedBatch | None:
        return self.batches.get(name)

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterable[Episode]:
        names = list(self.episodes)
        names = names[: names.index(before)] if before is not None else names
        found = [self.episodes[name] for name in reversed(names)]
        return [item for item in found if state in (None, item.state) and task in (None, item.opening.task)][:limit]


class LedgerRig:
    """`events` is all that happened. With `watch` the state is checked after each."""

    def __init__(
        self, settings: LedgerSettings = SETTINGS, *, watch: bool = False, archive: Archive | None = None
    ) -> None:
        self.state = State(settings, archive)
        self.presence = Presence()
        self.commands = Commands(self.state, self.presence)
        self.events: list[Event] = []
        self.at = 1000.0
        self._watch = watch
        self._ids = count()

    def run(self, events: Sequence[Event]) -> Sequence[Event]:
        """Apply the events of one command."""
        for event in events:
            self.state.apply(event)
            self.events.append(event)
            if self._watch:
                check(self.state)
        return events

    def whole(self, command: Callable[..., Sequence[Event]], *given: Any, **named: Any) -> Sequence[Event]:
        """Apply the events of a command, given again as long as it has done a part."""
        found = list[Event]()
        while isinstance(events := command(*given, **named), Part):
            self.run(events)
            found += events
        self.run(events)
        return (*found, *events)

    def id(self, kind: str) -> str:
        return f"{kind}-{next(self._ids):03d}"

    def open(self, episode: str | None = None, *, tenant: str = "", **fields: Any) -> str:
        episode = episode or self.id("ep")
        self.whole(self.commands.open_episode, OpenEpisode(**fields), episode=episode, at=self.at, tenant=tenant)
        return episode

    def begin(
        self, episode: str, *, choices: int = 1, model: str = "m", agent: str = "", task: str | None = None,
        eval: bool = False, tenant: str = "", body: str = "", key: str | None = None, retry: int = 0,
        route: str = "", client: str | None = None, said: str = "", prompt: str = "", identified_by: str = "path",
        traffic: str = "", first: str = "", withdraws: bool = False, issued: float = 0.0,
        judged: bool = True, consents: bool = True,
    ) -> tuple[str, ...]:
        calls = tuple(self.id("call") for _ in range(choices))
        started = CallStarted(
            self.at, episode, calls, model, agent, identified_by, body or calls[0], key, route, retry, said
        )
        asked = CallAsked(
            started, tenant, task, eval, client, prompt, traffic=traffic, first=first, withdraws=withdraws,
            issued=issued, judged=judged, consents=consents,
        )
        self.run(self.commands.begin_call(asked, self.state.episodes.find(episode)))
        return calls

    def finish(
        self, episode: str, call: str, prompt: Sequence[int] = (1, 2), sampled: Sequence[int] = (3,), *,
        version: int | None = None, same_text: tuple[str, int] | None = None, begins: Sequence[str] = (),
        marks: tuple[Mark, ...] = (), response: str | None = None,
    ) -> Sequence[Event]:
        known = self.state.episodes.find(episode)
        assert known is not None
        entry = known.transcript.calls[call]
        version = self.state.weights.policy_version(entry.asked.model) if version is None else version
        done = make_call(
            call, prompt, sampled, at=entry.asked.started_at, model=entry.asked.model or "m", agent=entry.asked.agent,
            version=version,
        )
        done = replace(done, same_text=same_text, response=response or f"answer-{call}")
        return self.run(self.commands.finish_call(
            episode, pack(done), at=self.at, marks=marks, begins=tuple(begins)
        ))

    def lose(
        self, episode: str, call: str, reason: str = "disconnected", *, taken_back: bool = False, **more: Any
    ) -> Sequence[Event]:
        return self.run(self.commands.lose_call(episode, call, reason, at=self.at, taken_back=taken_back, **more))

    def unanswered(self, episode: str) -> list[dict[str, Any]]:
        return self.state.episodes.known(episode).attempts.unanswered()

    def call(
        self, episode: str, prompt: Sequence[int] = (1, 2), sampled: Sequence[int] = (3,), **options: Any
    ) -> str:
        """A whole call from begin to finish. One that names no model is answered by "m"."""
        known = {name: options.pop(name) for name in ("version", "same_text") if name in options}
        (call,) = self.begin(episode, **options)
        self.finish(episode, call, prompt, sampled, **known)
        return call

    def reward(self, episode: str, value: float = 1.0, **fields: Any) -> Sequence[Event]:
        body = Reward(value, **fields)
        return self.run(self.commands.reward(episode, body, reward_id=body.id or self.id("rew"), at=self.at))

    def ends(self, episode: str, reward: float | None = 1.0, **call: Any) -> None:
        """A whole call of `episode`, and its reward (None: it is sealed without)."""
        self.call(episode, **call)
        if reward is None:
            self.seal(episode)
        else:
            self.reward(episode, reward)

    def leased(self, **asked: Any) -> list[tuple[str, ...]]:
        """The groups of a lease; none if there are too few."""
        batch = self.lease(**asked)
        return [] if batch is None else [names for _, names in self.state.batches[batch].groups]

    def judge(self, episode: str, value: float | None = 1.0, judge: str = "judge", **fields: Any) -> Sequence[Event]:
        """A judgement of the whole episode, or of what `fields` say; None: without a reward."""
        rewards = () if value is None else ({"value": value} | fields,)
        return self.run(self.commands.judging.judge(episode, Judgement(judge, rewards), at=self.at))

    def feedback(self, episode: str, call: str | None = None, **said: Any) -> Sequence[Event]:
        body = Feedback(episode=episode, **said)
        return self.run(self.commands.judging.feedback(episode, call, body, at=self.at))

    def withdraw(self, episode: str) -> Sequence[Event]:
        return self.run(tuple(self.commands.judging.withdraw(episode, self.at)))

    def heartbeat(self, episode: str) -> Sequence[Event]:
        return self.run(self.commands.heartbeat(episode, at=self.at))

    def seal(self, episode: str) -> Sequence[Event]:
        return self.run(self.commands.seal(episode, at=self.at))

    def abort(self, episode: str, reason: str | None = None, cause: str | None = None) -> Sequence[Event]:
        return self.run(self.commands.abort(episode, Abort(reason, cause), at=self.at))

    def join(self, name: str = "host", *, tenant: str = "", **fields: Any) -> str:
        """The id of a client that has joined."""
        body = Join(name, **fields)
        client = body.id or self.id("client")
        self.whole(self.commands.clients.join, body, client=client, tenant=tenant, at=self.at)
        return client

    def beat(self, client: str) -> None:
        self.presence.client_beats(self.commands.clients.live(client), self.at)

    def leave(self, client: str) -> Sequence[Event]:
        return self.run(self.commands.clients.leave(client, at=self.at))

    def lease(self, **fields: Any) -> str | None:
        """The batch, or None if nothing is ready."""
        batch = self.id("batch")
        body = Lease(**fields)
        self.run(self.commands.leases.lease(body, batch=batch, at=self.at))
        self.presence.lead(body.model, body.max_lead)
        return batch if batch in self.state.batches else None

    def batch(self, **fields: Any) -> str:
        """The batch of a lease that finds one."""
        batch = self.lease(**fields)
        assert batch is not None
        return batch

    def ack(self, batch: str, version: int = 1, **filtered: str) -> Sequence[Event]:
        return self.run(self.commands.leases.ack(batch, Ack(version, filtered), at=self.at))

    def nack(self, batch: str) -> Sequence[Event]:
        return self.run(self.commands.leases.nack(batch, at=self.at))

    def extend(self, batch: str, lease_s: float = 300.0) -> Sequence[Event]:
        return self.run(self.commands.leases.extend(batch, Extend(lease_s), at=self.at))

    def announce(
        self, model: str = "m", version: int = 1, upstreams: tuple[str, ...] | None = None, run: str | None = None
    ) -> Sequence[Event]:
        return self.whole(self.commands.trainers.announce, Policy(model, version, upstreams, run), at=self.at)

    def gate_close(self, model: str | None = None) -> Sequence[Event]:
        return self.run(self.commands.trainers.gate_close(GateClose(model=model), at=self.at))

    def gate_open(self, version: int, model: str | None = None) -> Sequence[Event]:
        return self.run(self.commands.trainers.gate_open(GateOpen(version, model), at=self.at))

    def mix(self, shares: Mapping[str, float] | None = None, **fields: Any) -> int:
        """The number of events that it makes."""
        return len(self.run(self.commands.leases.set_mix(SetMix(shares, **fields), at=self.at)))

    def full(self, task: str | None = "t", **fields: Any) -> bool:
        """Tell whether an opening would have to wait."""
        body = OpenEpisode(task=task, **fields)
        where = paced(self.state, self.commands.open_episode(body, episode=body.id or "new", at=self.at, tenant=""))
        return where is not None and self.state.mixes.room(where[0].lane, where[1]) == 0

    def lacking(self, **asked: Any) -> list[tuple[str | None, tuple[str, ...]]]:
        """The models and lanes that a lease, which finds too little of them, lets in."""
        events = self.run(self.commands.leases.lease(Lease(**asked), batch="none", at=self.at))
        assert "none" not in self.state.batches
        return [(event.model, event.lanes) for event in events if isinstance(event, LanesLacking)]

    def stands(self, model: str = "next", version: int = 2, of: str = "m", *urls: str) -> Sequence[Event]:
        """A candidate `of` a model has these weights."""
        return self.run(self.commands.trainers.announce(Policy(model, version, urls, candidate_of=of), at=self.at))

    def attend(self, says: str = "beats", run: str = "a", instance: str = "", model: str = "m") -> Sequence[Event]:
        """A trainer says how it is; its folder is named as its run, as is its process unless `instance` names it."""
        body = Attend(model, run, instance or f"{run}1", says, "host", f"/{run}")
        events = self.whole(self.commands.trainers.attend, body, at=self.at)
        self.presence.trainer_beats(model, self.at)
        return events

    def evaluate(self, model: str = "m", episodes: int = 2, name: str | None = None) -> str:
        """The evaluation that is wanted now."""
        body = Evaluate(model, episodes, name)
        name = name or self.id("eval")
        self.run(self.commands.trainers.evaluate(body, evaluation=name, at=self.at))
        return name

    def expire(self) -> Sequence[Event]:
        return self.run(self.commands.expire(self.at))

    def tick(self) -> None:
        """Does what time alone makes true, all of it."""
        while self.expire():
            """As the daemon does."""

    def later(self, seconds: float) -> None:
        """Time passes, and makes true what it alone does."""
        self.at += seconds
        self.tick()

    def restart(self) -> Sequence[Event]:
        return self.run(self.commands.restarted(self.at))

    def archive(self, kept: int = 0) -> Sequence[Event]:
        """Archive what ended, but for the latest `kept`."""
        with mock.patch.object(retention, "KEPT_EPISODES", kept):
            return self.run(retention.to_archive(self.state, self.at))

    def ready(
        self, task: str = "t", *, model: str = "m", version: int | None = None, reward: float = 1.0,
        members: Mapping[str, str] | None = None, scope: Mapping[str, str] | None = None, **how: Any,
    ) -> str:
        """An episode that is ready, in which each of `members` has called its model; without any, one call of `model`.
        What it is rewarded for is limited by `scope`."""
        episode = self.open(task=task, members=members, **how)
        for agent, one in (members or {"": model}).items():
            self.call(episode, model=one, agent=agent, version=version, tenant=how.get("tenant", ""))
        self.reward(episode, reward, **scope or {})
        assert self.state_of(episode) == "ready"
        return episode

    def state_of(self, episode: str) -> str:
        known = self.state.episodes.find(episode)
        assert known is not None
        return known.state

    def in_state(self, state: str) -> str:
        """A new episode in `state`."""
        episode = self.open(task=f"only {state}", eval=state == "recorded")
        if state == "discarded":
            self.abort(episode)
        elif state == "sealed":
            self.begin(episode)
            self.seal(episode)
        elif state != "open":
            self.call(episode)
            self.reward(episode, id="given")
        if state in ("leased", "trained"):
            batch = self.lease(group_size=1)
            assert batch is not None
            if state == "trained":
                self.ack(batch)
        assert self.state_of(episode) == state
        return episode
