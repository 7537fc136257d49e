"""Every control route and its body: the single table that the proxy serves and that every client speaks.

A body is a frozen dataclass; `parse` turns decoded JSON into it and refuses what does not fit with a `BadRequest` that
names the field. Unknown fields are refused too, with the nearest known name, because a misspelt ``final`` must not
silently seal an episode.

Invariant: whatever `parse` returns can be written as UTF-8, strict JSON and MessagePack. It has no lone surrogates, no
NaN or infinity, no integer over 64 bits, no deep nesting. JSON itself allows all four, a journal does not.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from ajet_sdk.errors import BadRequest

KEY_PREFIX = "ajet-"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}\Z")
PREFIX = "/ajet/v1"
HEADER_PREFIX = "x-ajet-"
"""How every header of ours begins, in lower case."""
HEADER_EPISODE = "X-AJet-Episode"
HEADER_CALL = "X-AJet-Call"
HEADER_TASK = "X-AJet-Task"
HEADER_AGENT = "X-AJet-Agent"
HEADER_EVAL = "X-AJet-Eval"
HEADER_REWARD = "X-AJet-Reward"
HEADER_REWARD_CALL = "X-AJet-Reward-Call"
HEADER_REWARD_STATE = "X-AJet-Reward-State"
HEADER_FINAL = "X-AJet-Final"
HEADER_WIRE = "X-AJet-Wire"
"""With ``POST batches/lease``: the frame versions that the trainer reads, separated by commas. If the proxy writes none
of them it answers 400 with code ``wire_version`` and leases nothing."""

EPISODE_STATES = ("open", "sealed", "ready", "leased", "trained", "recorded", "discarded")
DISCARD_REASONS = (
    "aborted", "idle_timeout", "wall_timeout", "no_reward", "incomplete_call", "stale", "filtered", "evicted",
)
MAX_NESTING = 32
MAX_VERSION = 2**31 - 1
"""No policy version is larger: batches say them in 32 bits."""
MAX_REWARD = 1e12
"""No reward is larger, on either side of 0: sums of as many as there are, and their squares, stay finite numbers."""


@dataclass(frozen=True, slots=True)
class OpenEpisode:
    """``POST episodes``. Timeouts are in seconds; without them the proxy's defaults hold. With ``place`` it is opened
    only if that is the next one of the model's evaluation."""

    task: str | None = None
    model: str | None = None
    agent: str | None = None
    eval: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    idle_timeout: float | None = None
    wall_timeout: float | None = None
    members: Mapping[str, str] | None = None
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """``POST episodes/ID/rewards``. ``id`` makes it idempotent; without one the proxy makes one. ``value`` is at most
    `MAX_REWARD`. ``state`` names the state in which ``call`` was made, so that it is compared with others in it."""

    value: float
    call: str | None = None
    agent: str | None = None
    final: bool = True
    id: str | None = None
    note: str | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """``POST episodes/ID/abort``; ``reason`` is the agent's own words, kept apart from the state's reason."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Empty:
    """The body of a route that takes none: ``{}`` or nothing."""


@dataclass(frozen=True, slots=True)
class Lease:
    """``POST batches/lease``: `groups` complete groups of `group_size` episodes of one task each. With `signal`, groups
    whose rewards are equal are discarded, and others take their place."""

    groups: int = 1
    group_size: int | None = None
    max_staleness: int | None = None
    model: str | None = None
    signal: bool = False
    wait_s: float = 0.0
    lease_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Extend:
    """``POST batches/ID/extend``: the lease now ends `lease_s` seconds from now."""

    lease_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Ack:
    """``POST batches/ID/ack``: the step that trained this batch is checkpointed. ``filtered`` are episodes of it that
    the trainer did not train, and why."""

    policy_version: int
    filtered: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateClose:
    """``POST gate/close``: hold new LLM requests; wait up to `wait_s` seconds for those in flight."""

    reason: str = "weights"
    wait_s: float = 600.0


@dataclass(frozen=True, slots=True)
class GateOpen:
    """``POST gate/open``: let requests through again, now served by `policy_version`."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class Policy:
    """``POST policy``: `model` is at `version`; `upstreams`, if given, replace its engines (base URLs)."""

    model: str
    version: int
    upstreams: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Evaluate:
    """``POST evaluations``: so many evaluation `episodes` of `model` are wanted, at the version that serves it. ``id``
    makes it idempotent; without one the proxy makes one."""

    model: str
    episodes: int
    id: str | None = None


@dataclass(frozen=True, slots=True)
class PutRun:
    """``PUT runs/NAME``: this configuration is wanted, and whether it should run. ``supervisor`` says whose run it is;
    unset, it is that of the only one there is. With ``restart``, a run that must start again for this does so."""

    config: Mapping[str, Any]
    desired: str
    supervisor: str | None = None
    restart: bool = False


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """``PATCH runs/NAME``: the keys of ``config`` replace those of the same name; a null takes one away."""

    config: Mapping[str, Any] | None = None
    desired: str | None = None
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Supervise:
    """``POST supervisor``: how its runs are, and what it says of the configurations that it was asked to check. The
    answer waits up to `wait_s` seconds for something else to be wanted than ``known`` stands for."""

    name: str
    instance: str
    runs: Mapping[str, Any] = field(default_factory=dict)
    verdicts: Mapping[str, Any] = field(default_factory=dict)
    known: str = ""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """One control route. ``scope`` is the least a key needs: ``agent``, ``trainer``, ``operator``, ``admin`` or
    ``any``."""

    name: str
    method: str
    path: str
    scope: str
    body: type[Any] | None


ROUTES: tuple[Route, ...] = (
    Route("open_episode", "POST", "/episodes", "agent", OpenEpisode),
    Route("list_episodes", "GET", "/episodes", "admin", None),
    Route("get_episode", "GET", "/episodes/{id}", "agent", None),
    Route("reward", "POST", "/episodes/{id}/rewards", "agent", Reward),
    Route("seal", "POST", "/episodes/{id}/seal", "agent", Empty),
    Route("abort", "POST", "/episodes/{id}/abort", "agent", Abort),
    Route("heartbeat", "POST", "/episodes/{id}/heartbeat", "agent", Empty),
    Route("lease", "POST", "/batches/lease", "trainer", Lease),
    Route("ack", "POST", "/batches/{id}/ack", "trainer", Ack),
    Route("nack", "POST", "/batches/{id}/nack", "trainer", Empty),
    Route("extend", "POST", "/batches/{id}/extend", "trainer", Extend),
    Route("gate_close", "POST", "/gate/close", "trainer", GateClose),
    Route("gate_open", "POST", "/gate/open", "trainer", GateOpen),
    Route("policy", "POST", "/policy", "trainer", Policy),
    Route("evaluate", "POST", "/evaluations", "trainer", Evaluate),
    Route("evaluation", "GET", "/evaluations/{id}", "trainer", None),
    Route("wanted", "GET", "/wanted", "agent", None),
    Route("list_runs", "GET", "/runs", "operator", None),
    Route("put_run", "PUT", "/runs/{id}", "operator", PutRun),
    Route("change_run", "PATCH", "/runs/{id}", "operator", ChangeRun),
    Route("get_run", "GET", "/runs/{id}", "operator", None),
    Route("forget_run", "DELETE", "/runs/{id}", "operator", None),
    Route("run_metrics", "GET", "/runs/{id}/metrics", "operator", None),
    Route("run_log", "GET", "/runs/{id}/log", "operator", None),
    Route("supervise", "POST", "/supervisor", "trainer", Supervise),
    Route("status", "GET", "/status", "any", None),
    Route("overview", "GET", "/overview", "admin", None),
    Route("events", "GET", "/events", "admin", None),
    Route("ca", "GET", "/ca.pem", "any", None),
)

_BY_NAME = {route.name: route for route in ROUTES}
B = TypeVar("B")


def route(name: str) -> Route:
    """The route called `name`; `KeyError` for a name that is not in the table."""
    return _BY_NAME[name]


def check_id(value: str, name: str = "episode") -> str:
    """`value` if it can name an episode (1 to 200 of ``A-Z a-z 0-9 . _ : @ -``, not starting like a key)."""
    if not _ID.match(value) or value.startswith(KEY_PREFIX):
        raise BadRequest(
            f"{name} must be 1 to 200 letters, digits or . _ : @ - and may not begin with {KEY_PREFIX!r}", param=name
        )
    return value


def parse(kind: type[B], body: Any) -> B:
    """`body` (decoded JSON; None counts as ``{}``) as a `kind`, or a `BadRequest` naming the field at fault."""
    body = {} if body is None else body
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in body.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known) or 'none'}"
            raise BadRequest(f"unknown field {name!r}{hint}", param=str(name))
        values[name] = _coerce(name, str(known[name].type), value)
    try:
        return kind(**values)
    except TypeError:
        missing = [n for n in known if n not in values and _required(known[n])]
        raise BadRequest(f"missing field {missing[0]!r}", param=missing[0]) from None


def to_json(body: Any) -> dict[str, Any]:
    """A body as the JSON object that `parse` reads back; fields at their default are left out."""
    out = {}
    for f in fields(body):
        value = getattr(body, f.name)
        if _required(f) or value != (f.default_factory() if callable(f.default_factory) else f.default):
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _coerce(name: str, kind: str, value: Any) -> Any:
    """`value` checked against the annotation `kind`; numbers must be finite."""
    if value is None and kind.endswith("| None"):
        return None
    base = kind.removesuffix(" | None")
    check_storable(value, name)
    if base == "float" and type(value) in (int, float):
        return float(value)
    if base == "int" and type(value) is int:
        return value
    if base == "bool" and type(value) is bool:
        return value
    if base == "str" and isinstance(value, str):
        return value
    if base.startswith("Mapping") and isinstance(value, Mapping):
        if base == "Mapping[str, str]" and not all(isinstance(item, str) for item in value.values()):
            raise BadRequest(f"{name} must map strings to strings", param=name)
        return dict(value)
    if base == "tuple[str, ...]" and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    words = {"float": "a finite number", "int": "an integer", "bool": "true or false", "str": "a string",
             "tuple[str, ...]": "a list of strings"}
    raise BadRequest(f"{name} must be {words.get(base, 'an object')}, not {repr(value)[:80]}", param=name)


def check_storable(value: Any, name: str, depth: int = 0) -> None:
    """Refuses what cannot be written as JSON at all, or not as UTF-8, strict JSON and MessagePack."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number, not {value}", param=name)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadRequest(f"{name} must be a finite number of at most 64 bits", param=name)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{name} must be text that UTF-8 can hold, without lone surrogates", param=name) from None
    if depth > MAX_NESTING:
        raise BadRequest(f"{name} is nested more than {MAX_NESTING} deep", param=name)
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_storable(key, name, depth + 1)
            check_storable(item, name, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_storable(item, name, depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise BadRequest(f"{name} must be what JSON can say, not a {type(value).__name__}", param=name)
