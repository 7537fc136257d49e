"""Every control route and its body: the single table that the proxy serves and that every client speaks.

A body says itself what it may hold (`ajet_sdk.bodies`). So a client hears of a mistake where it makes the body, in the
words in which the proxy would have refused it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ajet_sdk.bodies import Body, check_episode, check_id, check_length, checked, cut, number, parse, text, word
from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import (
    MAX_AGE_S,
    MAX_AHEAD,
    MAX_CLIENT_TEXT,
    MAX_CONTROL,
    MAX_EVALUATION,
    MAX_GROUPS,
    MAX_ID,
    MAX_JUDGEMENTS,
    MAX_LABEL,
    MAX_LANE_WAIT_S,
    MAX_LEASE_S,
    MAX_OPENING,
    MAX_PLAY,
    MAX_REWARD,
    MAX_SPENT,
    MAX_TTL_S,
    MAX_VERSION,
    MAX_WAIT_S,
    MAX_WORDS,
    check_agents,
    check_name,
    check_shares,
    check_upstreams,
)

PREFIX = "/ajet/v1"

EPISODE_STATES = ("open", "sealed", "ready", "leased", "trained", "recorded", "discarded")
DiscardReason = Literal[
    "aborted", "idle_timeout", "wall_timeout", "no_reward", "incomplete_group", "incomplete_call", "stale", "filtered",
    "client_gone", "older_revision", "other_run", "withdrawn", "not_judged",
]
DISCARD_REASONS: tuple[DiscardReason, ...] = get_args(DiscardReason)
LEASE_UNITS = ("groups", "episodes")
DEFAULT_LANE = "default"
"""The lane of tasks that name none."""
ABORT_CAUSES = ("agent", "infra")
"""Whose failure it was that an episode is given up: the agent's own, or the world's."""
TRAINER_SAYS = ("comes", "beats", "begins", "leaves")
"""The words of a trainer: that its process is at work, still is, has its weights ready for the engines, and has
ended."""
CLIENT_ENDS = ("left", "replaced", "silent")
"""Why a client is gone."""
DESIRED = ("running", "stopped")
"""The states in which a run can be wanted."""


def _cut(body: Body, name: str) -> None:
    """Makes words fit that must not cost what they stand beside: they are often a program's output."""
    if isinstance(words := getattr(body, name), str):
        object.__setattr__(body, name, cut(words, MAX_WORDS))


@dataclass(frozen=True, slots=True)
class OpenEpisode(Body):
    """``POST episodes``. Timeouts are in seconds; without them the proxy's defaults hold. With ``place`` it is
    opened only if that is the next one of the model's evaluation, or is free in its ``play``. ``client`` plays it,
    under ``revision`` or its own. A ``trial`` is recorded, and belongs to no evaluation. One to be ``judged``
    awaits a judgement once it is sealed, unless it is rewarded. ``id`` makes it idempotent; without one the proxy
    makes one. If its lane is full, the proxy may hold it for ``hold_s`` seconds (0: it refuses at once; None: as
    long as it does by itself). ``members`` and ``teachers`` map names of agents to their models; what members
    sampled is trained, and what teachers did never is. One to be ``graded`` is sealed by no reward, since whoever
    opened it gives another at its end, and seals it."""

    task: str | None = text(0, MAX_LABEL, None)
    model: str | None = text(0, MAX_LABEL, None)
    agent: str | None = text(0, MAX_LABEL, None)
    eval: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    idle_timeout: float | None = number(0, MAX_AGE_S, None, above=True)
    wall_timeout: float | None = number(0, MAX_AGE_S, None, above=True)
    members: Mapping[str, str] | None = checked(check_agents, None)
    place: int | None = number(0, MAX_PLAY - 1, None)
    client: str | None = None
    revision: str | None = text(0, MAX_CLIENT_TEXT, None)
    play: str | None = None
    trial: bool = False
    id: str | None = checked(check_id, None)
    hold_s: float | None = number(0, MAX_WAIT_S, None)
    teachers: Mapping[str, str] | None = checked(check_agents, None)
    judged: bool = False
    graded: bool = False

    def __post_init__(self) -> None:
        """Also refuses a team in which members and teachers cannot be distinguished."""
        Body.__post_init__(self)
        members = self.members or {}
        for name, model in (self.teachers or {}).items():
            if name in members:
                raise BadRequest(f"{name!r} is a member and a teacher: which of them?", param="teachers")
            if model in (self.model, *members.values()):
                said = f"the calls of teacher {name!r} are never trained, and others learn as {model!r}: name another"
                raise BadRequest(said, param="teachers")


@dataclass(frozen=True, slots=True)
class Reward(Body):
    """``POST episodes/ID/rewards``. ``id`` makes it idempotent; without one the proxy makes one. ``value`` is at most
    `MAX_REWARD`. ``state`` names the state in which ``call`` was made, so that it is compared with others in it. With
    ``model`` it is only for what that model sampled. ``response`` names a call by the id of the answer that its client
    saw. Then ``POST rewards`` finds the episode. ``note`` is cut to `MAX_WORDS`."""

    value: float = number(-MAX_REWARD, MAX_REWARD)
    call: str | None = None
    agent: str | None = text(0, MAX_LABEL, None)
    final: bool = True
    id: str | None = text(1, MAX_ID, None)
    note: str | None = None
    state: str | None = text(1, MAX_LABEL, None)
    model: str | None = text(1, MAX_LABEL, None)
    response: str | None = text(1, MAX_ID, None)

    def __post_init__(self) -> None:
        """Also cuts the note, and refuses a state of no call, and a model beside a call."""
        _cut(self, "note")
        Body.__post_init__(self)
        is_of_a_call = self.call is not None or self.response is not None
        if self.state is not None and not is_of_a_call:
            raise BadRequest("state is that of a call: name the call too", param="state")
        if self.model is not None and is_of_a_call:
            raise BadRequest("a call is of one model already: leave the model out", param="model")


@dataclass(frozen=True, slots=True)
class Feedback(Body):
    """``POST feedback``: what a user says of an answer, which ``response`` or ``call`` names, or of a whole
    ``episode``. A thumb is the ``value`` 1 or -1. ``better`` is the answer as it should have been."""

    response: str | None = text(1, MAX_ID, None)
    call: str | None = text(1, MAX_ID, None)
    episode: str | None = checked(check_episode, None)
    value: float | None = number(-1, 1, None)
    better: str | None = text(0, MAX_WORDS, None)
    text: str | None = text(0, MAX_WORDS, None)

    def __post_init__(self) -> None:
        """Also refuses what is of nothing, and what says nothing."""
        Body.__post_init__(self)
        if self.response is None and self.call is None and self.episode is None:
            raise BadRequest("say of which answer: by its response, its call or its episode", param="response")
        if self.value is None and self.text is None and self.better is None:
            raise BadRequest("say something: a value, a text or a better answer", param="value")


@dataclass(frozen=True, slots=True)
class LeaseJudgements(Body):
    """``POST judgements/lease``: `n` episodes that await a judgement, or as many groups of them, for `lease_s` seconds.
    """

    n: int = number(1, MAX_JUDGEMENTS, 1)
    lane: str | None = text(1, MAX_LABEL, None)
    model: str | None = text(1, MAX_LABEL, None)
    unit: str = word(LEASE_UNITS, "episodes")
    wait_s: float = number(0, MAX_WAIT_S, 0.0)
    lease_s: float = number(0, MAX_LEASE_S, 600.0, above=True)


@dataclass(frozen=True, slots=True)
class Score(Body):
    """One reward of a judgement: that of a ``call``, of an ``agent``, or of the episode."""

    value: float = number(-1, 1)
    call: str | None = text(1, MAX_ID, None)
    agent: str | None = text(1, MAX_LABEL, None)
    note: str | None = None

    def __post_init__(self) -> None:
        """Also cuts the note, and refuses an agent beside a call."""
        _cut(self, "note")
        Body.__post_init__(self)
        if self.call is not None and self.agent is not None:
            raise BadRequest("a call is of one agent already: leave the agent out", param="agent")


@dataclass(frozen=True, slots=True)
class Judgement(Body):
    """``POST episodes/ID/judgement``: the rewards (each a `Score` as JSON) that the source of the name ``judge`` gives.
    With none the episode is not judged, and is discarded. With ``withdraw`` nothing may be learned from it. ``tokens``
    is what the judge has used since it last said so."""

    judge: str = text(1, MAX_CLIENT_TEXT)
    rewards: tuple[Mapping[str, Any], ...] = ()
    withdraw: bool = False
    tokens: int = number(0, MAX_SPENT, 0)

    def __post_init__(self) -> None:
        """Also refuses too many rewards, and two of one thing."""
        Body.__post_init__(self)
        if len(self.rewards) > MAX_JUDGEMENTS:
            raise BadRequest(f"a judgement has at most {MAX_JUDGEMENTS} rewards", param="rewards")
        scores = self.scores
        if len({(one.call, one.agent) for one in scores}) < len(scores):
            raise BadRequest("two rewards are of one call, of one agent, or of the episode", param="rewards")

    @property
    def scores(self) -> tuple[Score, ...]:
        """The rewards."""
        return tuple(parse(Score, one) for one in self.rewards)


@dataclass(frozen=True, slots=True)
class Abort(Body):
    """``POST episodes/ID/abort``; ``reason`` is the agent's own words, kept apart from the state's reason. It is often
    an exception's text, so it is cut where others are refused. ``cause`` is one of `ABORT_CAUSES`."""

    reason: str | None = None
    cause: str | None = word(ABORT_CAUSES, None)

    def __post_init__(self) -> None:
        """Also cuts the reason."""
        _cut(self, "reason")
        Body.__post_init__(self)


@dataclass(frozen=True, slots=True)
class Empty(Body):
    """The body of a route that takes none: ``{}`` or nothing."""


@dataclass(frozen=True, slots=True)
class Lease(Body):
    """``POST batches/lease``: `groups` complete groups of `group_size` episodes of one task each; if `unit` is
    ``episodes``, groups with `groups` episodes together. With `signal`, groups whose rewards are equal are discarded,
    and others take their place. With `min_group_size`, a task ends if none of its episodes is open and none was opened
    for `group_wait_s` seconds. What is ready of it is a group then if it is large enough, else it is discarded. With
    `max_lead`, nothing is leased while `model` is more updates than that ahead of the slowest of its team."""

    groups: int = number(1, MAX_GROUPS, 1)
    group_size: int | None = number(1, MAX_GROUPS, None)
    max_staleness: int | None = number(0, MAX_VERSION, None)
    model: str | None = text(0, MAX_LABEL, None)
    signal: bool = False
    unit: str = word(LEASE_UNITS, "groups")
    min_group_size: int | None = number(1, MAX_GROUPS, None)
    group_wait_s: float = number(0, MAX_AGE_S, 60.0)
    wait_s: float = number(0, MAX_WAIT_S, 0.0)
    lease_s: float = number(0, MAX_LEASE_S, 300.0, above=True)
    max_lead: int | None = number(0, MAX_VERSION, None)

    def __post_init__(self) -> None:
        """Also refuses a lead of no model."""
        Body.__post_init__(self)
        if self.max_lead is not None and not self.model:
            raise BadRequest("max_lead is that of a model: name the model too", param="model")


@dataclass(frozen=True, slots=True)
class Flush(Body):
    """``POST groups/flush``: of what is ready now of `lane` and `task` (None: of all), nothing more is waited for."""

    lane: str | None = text(0, MAX_LABEL, None)
    task: str | None = text(0, MAX_LABEL, None)


@dataclass(frozen=True, slots=True)
class SetMix(Body):
    """``PUT mix``: what is given is changed. The `shares` of lanes add up to 1. A lane with all of the share may have
    `ahead` groups open or ready (0: any number), each of `group_size` episodes. A lane with nothing for `lane_wait_s`
    seconds lends its turns. A named `model` has a mix of its own from then on."""

    shares: Mapping[str, float] | None = checked(check_shares, None)
    ahead: int | None = number(0, MAX_AHEAD, None)
    group_size: int | None = number(0, MAX_GROUPS, None)
    lane_wait_s: float | None = number(0, MAX_LANE_WAIT_S, None)
    model: str | None = text(0, MAX_LABEL, None)


@dataclass(frozen=True, slots=True)
class Extend(Body):
    """``POST batches/ID/extend``: the lease now ends `lease_s` seconds from now."""

    lease_s: float = number(0, MAX_LEASE_S, 300.0, above=True)


@dataclass(frozen=True, slots=True)
class Ack(Body):
    """``POST batches/ID/ack``: the step that trained this batch is checkpointed. ``filtered`` are episodes of it that
    the trainer did not train, and why."""

    policy_version: int = number(0, MAX_VERSION)
    filtered: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Also refuses a reason that is too long."""
        Body.__post_init__(self)
        for why in self.filtered.values():
            check_length(why, "filtered", 0, MAX_WORDS)


@dataclass(frozen=True, slots=True)
class GateClose(Body):
    """``POST gate/close``: hold new LLM requests of `model`; wait up to `wait_s` seconds for those in flight. Without a
    model, the one that is announced is meant."""

    reason: str = text(0, MAX_WORDS, "weights")
    wait_s: float = number(0, MAX_WAIT_S, 600.0)
    model: str | None = text(0, MAX_LABEL, None)


@dataclass(frozen=True, slots=True)
class GateOpen(Body):
    """``POST gate/open``: let requests of `model` through again, now served by `policy_version`."""

    policy_version: int = number(0, MAX_VERSION)
    model: str | None = text(0, MAX_LABEL, None)


@dataclass(frozen=True, slots=True)
class Policy(Body):
    """``POST policy``: `model` is at `version` of a `run` (unset: the one before); `upstreams`, if given, replace its
    engines (base URLs). With `candidate_of` it is a candidate of that model, and serves nobody but who names it."""

    model: str = text(1, MAX_LABEL)
    version: int = number(0, MAX_VERSION)
    upstreams: tuple[str, ...] | None = checked(check_upstreams, None)
    run: str | None = text(1, MAX_CLIENT_TEXT, None)
    candidate_of: str | None = text(1, MAX_LABEL, None)


@dataclass(frozen=True, slots=True)
class Attend(Body):
    """``POST trainers``: the process `instance` trains `model` in a `run`, with its `folder` on `host`. It `says` one
    of `TRAINER_SAYS`."""

    model: str = text(1, MAX_LABEL)
    run: str = text(1, MAX_CLIENT_TEXT)
    instance: str = text(1, MAX_CLIENT_TEXT)
    says: str = word(TRAINER_SAYS, "beats")
    host: str = text(0, MAX_LABEL, "")
    folder: str = text(0, MAX_WORDS, "")


@dataclass(frozen=True, slots=True)
class Evaluate(Body):
    """``POST evaluations``: so many evaluation `episodes` of `model` are wanted, at the version that serves it. ``id``
    makes it idempotent; without one the proxy makes one."""

    model: str = text(1, MAX_LABEL)
    episodes: int = number(1, MAX_EVALUATION)
    id: str | None = checked(check_id, None)


@dataclass(frozen=True, slots=True)
class Play(Body):
    """``POST plays``: a data set of so many `episodes` is played under `name`. One that is being played goes on."""

    name: str = checked(check_id)
    episodes: int = number(1, MAX_PLAY)


@dataclass(frozen=True, slots=True)
class Join(Body):
    """``POST clients``: this process runs agents, and is gone once it has not said so for ``ttl_s`` seconds. With
    ``replaces``, an older client of the name is gone. With ``replaces_older``, episodes of the lane that were played
    under another revision are discarded. ``id`` makes it idempotent; without one the proxy makes one."""

    name: str = text(1, MAX_CLIENT_TEXT)
    revision: str | None = text(1, MAX_CLIENT_TEXT, None)
    lane: str | None = text(1, MAX_CLIENT_TEXT, None)
    ttl_s: float = number(0, MAX_TTL_S, 30.0, above=True)
    replaces: bool = True
    replaces_older: bool = False
    id: str | None = checked(check_id, None)

    def __post_init__(self) -> None:
        """Also refuses a lane that cannot begin a task's name, and to replace what is older in no lane."""
        Body.__post_init__(self)
        if "/" in (self.lane or ""):
            raise BadRequest("a lane has no '/': that is what ends it in a task's name", param="lane")
        if self.replaces_older and self.lane is None:
            raise BadRequest("replaces_older needs the lane in which it replaces", param="lane")


@dataclass(frozen=True, slots=True)
class PutRun(Body):
    """``PUT runs/NAME``: this configuration is wanted, and whether it should run. ``supervisor`` says whose run it is;
    unset, it is that of the only one there is. With ``restart``, a run that must start again for this does so."""

    config: Mapping[str, Any]
    desired: str = word(DESIRED)
    supervisor: str | None = checked(check_name, None)
    restart: bool = False


@dataclass(frozen=True, slots=True)
class ChangeRun(Body):
    """``PATCH runs/NAME``: the keys of ``config`` replace those of the same name; a null takes one away."""

    config: Mapping[str, Any] | None = None
    desired: str | None = word(DESIRED, None)
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Supervise(Body):
    """``POST supervisor``: how its runs are, and what it says of the configurations that it was asked to check. The
    answer waits up to `wait_s` seconds for something else to be wanted than ``known`` stands for."""

    name: str = checked(check_name)
    instance: str = text(1, MAX_LABEL)
    runs: Mapping[str, Any] = field(default_factory=dict)
    verdicts: Mapping[str, Any] = field(default_factory=dict)
    known: str = ""
    wait_s: float = number(0, MAX_WAIT_S, 0.0)


@dataclass(frozen=True, slots=True)
class Route:
    """One control route. ``scope`` is the least a key needs: ``agent``, ``trainer``, ``operator``, ``judge``,
    ``admin`` or ``any``. ``of_model`` is what it changes of models: that which its body names (``one``), or others too
    (``all``). A body has at most ``max_body`` bytes."""

    name: str
    method: str
    path: str
    scope: str
    body: type[Any] | None
    of_model: str = ""
    max_body: int = MAX_CONTROL


ROUTES: tuple[Route, ...] = (
    Route("open_episode", "POST", "/episodes", "agent", OpenEpisode, max_body=MAX_OPENING),
    Route("list_episodes", "GET", "/episodes", "admin", None),
    Route("get_episode", "GET", "/episodes/{id}", "agent", None),
    Route("reward", "POST", "/episodes/{id}/rewards", "agent", Reward),
    Route("reward_answer", "POST", "/rewards", "agent", Reward),
    Route("seal", "POST", "/episodes/{id}/seal", "agent", Empty),
    Route("abort", "POST", "/episodes/{id}/abort", "agent", Abort),
    Route("heartbeat", "POST", "/episodes/{id}/heartbeat", "agent", Empty),
    Route("feedback", "POST", "/feedback", "agent", Feedback),
    Route("lease_judgements", "POST", "/judgements/lease", "judge", LeaseJudgements),
    Route("judge", "POST", "/episodes/{id}/judgement", "judge", Judgement),
    Route("lease", "POST", "/batches/lease", "trainer", Lease, "one"),
    Route("ack", "POST", "/batches/{id}/ack", "trainer", Ack),
    Route("nack", "POST", "/batches/{id}/nack", "trainer", Empty),
    Route("extend", "POST", "/batches/{id}/extend", "trainer", Extend),
    Route("flush", "POST", "/groups/flush", "trainer", Flush, "all"),
    Route("mix", "GET", "/mix", "trainer", None),
    Route("set_mix", "PUT", "/mix", "trainer", SetMix, "one"),
    Route("drop_mix", "DELETE", "/mix", "trainer", None),
    Route("gate_close", "POST", "/gate/close", "trainer", GateClose, "one"),
    Route("gate_open", "POST", "/gate/open", "trainer", GateOpen, "one"),
    Route("policy", "POST", "/policy", "trainer", Policy, "one"),
    Route("trainers", "POST", "/trainers", "trainer", Attend, "one"),
    Route("evaluate", "POST", "/evaluations", "trainer", Evaluate, "one"),
    Route("evaluation", "GET", "/evaluations/{id}", "trainer", None),
    Route("wanted", "GET", "/wanted", "agent", None),
    Route("play", "POST", "/plays", "agent", Play),
    Route("get_play", "GET", "/plays/{id}", "agent", None),
    Route("end_play", "DELETE", "/plays/{id}", "agent", None),
    Route("join", "POST", "/clients", "agent", Join),
    Route("clients", "GET", "/clients", "agent", None),
    Route("beat", "POST", "/clients/{id}/beat", "agent", Empty),
    Route("leave", "DELETE", "/clients/{id}", "agent", None),
    Route("list_runs", "GET", "/runs", "operator", None),
    Route("put_run", "PUT", "/runs/{id}", "operator", PutRun),
    Route("change_run", "PATCH", "/runs/{id}", "operator", ChangeRun),
    Route("get_run", "GET", "/runs/{id}", "operator", None),
    Route("forget_run", "DELETE", "/runs/{id}", "operator", None),
    Route("run_metrics", "GET", "/runs/{id}/metrics", "operator", None),
    Route("run_log", "GET", "/runs/{id}/log", "operator", None),
    Route("supervise", "POST", "/supervisor", "trainer", Supervise, "all"),
    Route("status", "GET", "/status", "any", None),
    Route("overview", "GET", "/overview", "admin", None),
    Route("events", "GET", "/events", "admin", None),
    Route("ca", "GET", "/ca.pem", "any", None),
)

_BY_NAME = {route.name: route for route in ROUTES}


def route(name: str) -> Route:
    """The route called `name`; `KeyError` for a name that is not in the table."""
    return _BY_NAME[name]


def lane_of(task: str) -> str:
    """The lane of a task, where none is given: what its name has before its first ``/``."""
    kind, slash, _ = task.partition("/")
    return kind if slash and kind else DEFAULT_LANE
