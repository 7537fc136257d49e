"""The daemon's whole vocabulary: everything that can happen to its state, each one a journal entry.

State changes only through `State.apply(event)`. The journal is the sequence of these records. So a replay of the
journal is the live state, and a crash test is a loop over prefixes of a file. Events are facts in the past tense: a
command (see `ajet_proxy.core.ledger.commands`) decides, returns events, and changes nothing itself.

Times are Unix seconds, handed in by the caller. Fields may be added with a default. Neither what a field means nor its
default may change, since the journal leaves defaults out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from ajet_proxy.core.conversation.history import Mark
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_sdk.routes import DiscardReason


class Event(Struct, frozen=True):
    """Something that happened."""

    at: float


Events = tuple[Event, ...]


class EpisodeEvent(Event, frozen=True):
    """Something that happened to one episode."""

    episode: str


class EpisodeOpened(EpisodeEvent, frozen=True):
    """An episode begins. Its limits are in seconds: without a call, and in all."""

    task: str | None
    model: str | None
    agent: str | None
    eval: bool
    idle_timeout: float
    wall_timeout: float
    tenant: str = ""
    metadata: Mapping[str, Any] = {}
    identified_by: str = "key"
    members: Mapping[str, str] | None = None
    evaluation: str | None = None
    client: str | None = None
    """Who plays it."""
    revision: str | None = None
    """The code of agent and reward that it is played with."""
    lane: str | None = None
    """The kind of its task, where it does not follow from the task's name."""
    play: str | None = None
    """The data set that it plays, and at which place."""
    place: int | None = None
    teachers: Mapping[str, str] | None = None
    """As `members`, and never trained."""
    judged: bool = False
    """Sealed without a reward, it awaits a judgement."""
    traffic: bool = False
    """Its calls are those of a user, who never hears of an end."""
    first: str = ""
    """The episode of which this is a later part, since that was sealed while its user went on."""
    issued: float = 0.0
    """When the key was issued that opened it, if it is traffic."""
    graded: bool = False
    """No reward seals it."""

    @property
    def whole(self) -> str:
        """The first episode of those of which it is a part."""
        return self.first or self.episode

    @property
    def to_train(self) -> tuple[str, ...]:
        """The models that it trains, if any was named: those of all members, or its own."""
        return tuple(dict.fromkeys(self.members.values() if self.members else filter(None, (self.model,))))

    @property
    def teaching(self) -> Collection[str]:
        """The models that are never trained from it."""
        return (self.teachers or {}).values()

    @property
    def given(self) -> Mapping[str, str]:
        """The models of members and teachers."""
        return {**(self.members or {}), **(self.teachers or {})}

    def agent_of(self, said: str | None, asked: str) -> str:
        """Whose call it is: as it says itself, else by its model's name, if that is a member's or a teacher's."""
        return said or (asked if asked in self.given else self.agent) or ""

    def model_for(self, agent: str, asked: str, served: Collection[str]) -> str | None:
        """The model that `agent` was given when the episode opened, or that is meant by the name of another agent. An
        agent that was not given its own may ask for any model that is `served` by name, such as a judge."""
        given = self.given
        member = given.get(agent, given.get(asked))
        return member if member is not None or (asked and asked in served) else self.model


class TaskNamed(EpisodeEvent, frozen=True):
    """An episode got its task: a label on one of its calls, or (``derived``) the hash of its first call's prompt."""

    task: str
    derived: bool = True


class CallStarted(EpisodeEvent, frozen=True):
    """A request went to the engine. ``calls`` has one id for each choice. ``body_hash`` recognizes a retry, and
    ``retries`` is how many retries the client has counted. ``route`` is the path that was asked, such as
    ``/v1/messages``."""

    calls: tuple[str, ...]
    model: str
    agent: str
    identified_by: str
    body_hash: str
    idempotency_key: str | None = None
    route: str = ""
    retries: int = 0
    said: str = ""
    """A key of what the request says (`core.ledger.attempts`)."""


class CallFinished(EpisodeEvent, frozen=True):
    """A choice is whole: exact ids and logprobs. Its id was announced by a `CallStarted`. A later request whose history
    begins with one of ``marks`` continues it."""

    call: Packed
    marks: tuple[Mark, ...] = ()
    begins: tuple[str, ...] = ()
    """Of what earlier requests said that were not answered yet, what this one begins with."""


class CallLost(EpisodeEvent, frozen=True):
    """A choice will never be trained. ``reason`` is from the closed list of contract §1.4. Its client may have the
    answer, and then continues from ``marks``."""

    call: str
    reason: str
    marks: tuple[Mark, ...] = ()
    begins: tuple[str, ...] = ()
    """As of a `CallFinished`."""
    status: int = 0
    """With which the engine refused it."""


class RequestLost(EpisodeEvent, frozen=True):
    """A request became no call, and the world failed it: `HELD` or `UNSERVED` of `core.ledger.attempts`. ``agent`` is
    None if nobody knows whose it was, and ``said`` empty if nobody knows what it said."""

    reason: str
    agent: str | None = None
    said: str = ""
    model: str = ""
    detail: str | None = None


class AnswersSent(Event, frozen=True):
    """The clients of ``calls`` have been sent the end of their answers. It comes a little later, once for many. If a
    call lacks it when the proxy starts again, perhaps no client heard of the call. The same holds for calls in
    ``unknown``, whose worker process is gone."""

    calls: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class RewardGiven(EpisodeEvent, frozen=True):
    """A reward of the whole episode, or of a `call`, an `agent` or a `model`; a final one seals the episode."""

    id: str
    value: float
    call: str | None
    agent: str | None
    final: bool
    note: str | None = None
    state: str | None = None
    """The state of the call when it was made, in the agent's words."""
    model: str | None = None


class FeedbackGiven(EpisodeEvent, frozen=True):
    """A user's word on a call, or on the whole episode. It takes the place of what was said of that before."""

    call: str | None
    value: float | None = None
    text: str | None = None
    better: str | None = None

    def to_json(self) -> dict[str, Any]:
        said = {"call": self.call, "value": self.value, "text": self.text, "better": self.better}
        return {"at": self.at} | {name: value for name, value in said.items() if value is not None}


class EpisodeJudged(EpisodeEvent, frozen=True):
    """``scores`` are ``(call, agent, value, note)``: the rewards that a ``judge`` gives, all at once."""

    judge: str
    scores: tuple[tuple[str | None, str | None, float, str | None], ...]


class JudgeSpent(Event, frozen=True):
    """The judge of this name has used so many ``tokens`` since it last said so."""

    judge: str
    tokens: int


class EpisodeWithdrawn(EpisodeEvent, frozen=True):
    """Nothing is learned from it, nor from its later parts. What is open takes calls, and is discarded at its end; what
    a trainer has is, if that gives it back. One that is archived is left out of exports."""


class EpisodeSealed(EpisodeEvent, frozen=True):
    """It takes no more calls, and becomes ready when those in flight have ended."""


class EpisodeDiscarded(EpisodeEvent, frozen=True):
    """``reason`` is from the closed list of contract §1.3; ``detail`` is free text. If another model has trained its
    share, only the shares of ``models`` are dropped, and the episode goes on without them."""

    reason: DiscardReason
    detail: str | None = None
    models: tuple[str, ...] = ()
    cause: str | None = None
    """Whose failure it was, if it was given up and that was said: one of `ABORT_CAUSES`."""


class EpisodeTouched(EpisodeEvent, frozen=True):
    """A heartbeat: the episode is alive though it calls nothing."""


class EpisodesLate(Event, frozen=True):
    """They have been open for so much longer than the others of their groups that nobody waits for them any more. They
    do not count as open from now on, and still become ready."""

    episodes: tuple[str, ...]


class BatchLeased(Event, frozen=True):
    """``groups`` are ``(task, episode ids)`` in the order in which they are delivered, all of one model. Those of fewer
    than ``size`` episodes are compared with others too."""

    batch: str
    lease_until: float
    policy_version: int
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    model: str
    size: int = 0


class LeaseExtended(Event, frozen=True):
    batch: str
    lease_until: float


class BatchReturned(Event, frozen=True):
    """Its episodes are ready again. ``reason``: nack, expired, or other_run."""

    batch: str
    reason: str


class BatchTrained(Event, frozen=True):
    """``filtered`` are episodes that were delivered and not trained, and why."""

    batch: str
    policy_version: int
    filtered: Mapping[str, str] = {}


class EpisodesArchived(Event, frozen=True):
    """Nothing can happen to them any more: from now on they are read in the archive. ``batches`` contain only archived
    episodes."""

    episodes: tuple[str, ...]
    batches: tuple[str, ...]


class PolicyAnnounced(Event, frozen=True):
    model: str
    version: int
    upstreams: tuple[str, ...] | None = None


class CandidateAnnounced(Event, frozen=True):
    """``model`` has weights at ``version`` that may come to serve as those of the model that it is a candidate ``of``.
    It answers by its own name, from ``upstreams``."""

    model: str
    version: int
    upstreams: tuple[str, ...]
    of: str


class TrainerCame(Event, frozen=True):
    """A trainer of ``model`` is at work from now on: the process ``instance``, with ``folder`` on ``host`` for its
    ``run``."""

    model: str
    run: str
    instance: str
    host: str = ""
    folder: str = ""


class TrainerLeft(Event, frozen=True):
    """The trainer of a model has ended."""

    model: str


class RunBegan(Event, frozen=True):
    """``model`` belongs to ``run`` from now on. What was sampled before is another's, if another had it. What is
    sampled until it is announced is nobody's."""

    model: str
    run: str


class EvaluationWanted(Event, frozen=True):
    """From now on, ``episodes`` evaluation episodes of a model are wanted, at the policy version that serves it."""

    evaluation: str
    model: str
    policy_version: int
    episodes: int


class MixSet(Event, frozen=True):
    """The lanes have these ``shares`` from now on; none: any lane. If they are those of before, turns go on. A named
    ``model`` has this mix as its own from then on. Without a name, it is that of all models that have none."""

    shares: Mapping[str, float] = {}
    ahead: int | None = None
    group_size: int | None = None
    lane_wait_s: float = 30.0
    model: str = ""


class GroupsFlushed(Event, frozen=True):
    """Of what is ready now of a lane and a task (None: of all), nothing more is waited for."""

    lane: str | None = None
    task: str | None = None


class PlayBegun(Event, frozen=True):
    """A data set is played from now on, with the places 0 to ``episodes - 1``."""

    play: str
    tenant: str
    episodes: int


class LanesLacking(Event, frozen=True):
    """A trainer waits for groups of these lanes, which are full, and nobody plays in them. So what there is of them
    does not count as ahead: what is ready until something is leased, and what is open until an agent does something
    with it. A named ``model`` has a mix of its own."""

    lanes: tuple[str, ...]
    model: str = ""


class PlayEnded(Event, frozen=True):
    """It is played no more: it is whole, or was given up."""

    play: str
    tenant: str


class RunWanted(Event, frozen=True):
    """A run of a trainer is wanted like this from now on. ``config`` is a flat configuration as JSON, and ``digest``
    what its supervisor calls it. ``starts`` is raised by what takes a restart."""

    run: str
    supervisor: str
    desired: str
    config: str
    digest: str
    starts: int = 0

    @property
    def keys(self) -> dict[str, Any]:
        """The flat configuration."""
        found: dict[str, Any] = json.loads(self.config)
        return found


class RunForgotten(Event, frozen=True):
    """A run is wanted no more, not even stopped."""

    run: str


class GateClosed(Event, frozen=True):
    """Requests of ``model`` are held. Without a name, all are: only one model was announced, or none."""

    reason: str
    model: str = ""


class GateOpened(Event, frozen=True):
    """Requests of ``model`` pass again, served by ``policy_version``. Without a name it is the only one."""

    policy_version: int
    model: str = ""


class ClientJoined(Event, frozen=True):
    """A process that runs agents has joined. It is gone once it is silent for ``ttl_s`` seconds."""

    client: str
    name: str
    ttl_s: float
    tenant: str = ""
    revision: str | None = None
    lane: str | None = None
    replaces_older: bool = False


class ClientGone(Event, frozen=True):
    """``reason`` is from the closed list `CLIENT_ENDS`. Its last sign of life was at ``heard_at``."""

    client: str
    reason: str
    heard_at: float = 0.0


class NameShared(Event, frozen=True):
    """A name that a session or a body gave was that of several runs. ``name`` is the id of its first episode."""

    name: str


class ProxyStarted(Event, frozen=True):
    """The proxy runs, perhaps again: silence during a stop was nobody's fault. From now on it merges by this policy,
    and the groups of models whose mix names no size have ``group_size`` seats. The latest event before that was at
    ``stopped_at``; 0 if there was none."""

    merge_policy: str
    group_size: int = 8
    stopped_at: float = 0.0

    @property
    def away(self) -> float:
        """For how many seconds the proxy did not run."""
        return max(self.at - self.stopped_at, 0.0) if self.stopped_at else 0.0

    @property
    def back(self) -> float:
        """The seconds that the machine's clock went back meanwhile (0 or below). Times that are counted from its old
        reading move with it."""
        return min(self.at - self.stopped_at, 0.0)
