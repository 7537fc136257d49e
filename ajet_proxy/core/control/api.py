"""The control plane as a function: a request and the ledger in, an answer and the events that make it true out.

Nothing changes here. The caller commits `Answer.events` and only then reads `Answer.body`, which is made at that moment
and so shows the state after the events. Waiting (leases, the gate) and encoding belong to
`ajet_proxy.io.control.routes`.

Invariant: a caller sees and changes only what its claims reach. A key of scope ``agent`` reaches one episode, or those
of its tenant; scope ``admin`` reaches all. Whether a scope reaches a route at all is checked before this function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ajet_proxy.core.control.overview import overview
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.commands import Ledger
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.views import Tokens, Wanted, parts, records
from ajet_sdk.errors import BadRequest, Forbidden, NotFound
from ajet_sdk.routes import (
    ROUTES,
    Abort,
    Ack,
    Empty,
    Extend,
    GateClose,
    GateOpen,
    Lease,
    OpenEpisode,
    Policy,
    Reward,
    Route,
    check_id,
    parse,
)

MAX_RECORDS = 1000
MAX_ID = 200
MAX_LABEL = 1000
MAX_WORDS = 10_000
"""Characters of a note or a reason."""
_TOKENS: Mapping[str, Tokens] = {"0": "none", "1": "all", "timelines": "timelines"}
Body = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Request:
    """``path`` is what follows ``/ajet/v1``, decoded; ``body`` is decoded JSON, None if there was none."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    claims: Claims


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` 200, or 204 for a lease that found nothing. ``show`` makes the body, in which an iterator stands for a
    list whose items are to be written one by one."""

    status: int
    events: tuple[Event, ...]
    show: Callable[[], Body]

    @property
    def body(self) -> Body:
        """The JSON object to answer with; read it after the events are committed."""
        return self.show()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request on its way through its handler. ``id`` is the one in its path."""

    ledger: Ledger
    request: Request
    id: str
    at: float
    new_id: Callable[[str], str]
    keys: Callable[[str, str], str]
    base: str

    def body(self, kind: type[Any]) -> Any:
        return parse(kind, self.request.body)

    def own(self) -> str:
        """The episode in the path, if it exists and the caller may reach it."""
        return reach(self.ledger, self.request.claims, self.id)


def handle(
    ledger: Ledger, request: Request, *, at: float, new_id: Callable[[str], str], keys: Callable[[str, str], str],
    base: str,
) -> Answer:
    """The answer to `request`. `keys` makes the key of a tenant's episode; `base` is the caller's URL of this proxy."""
    route, name = match(request.method, request.path)
    return _HANDLERS[route.name](_Asked(ledger, request, name, at, new_id, keys, base))


def match(method: str, path: str) -> tuple[Route, str]:
    """The route and the id in its path, or `NotFound`."""
    parts = path.split("/")
    for route in ROUTES:
        pattern = route.path.split("/")
        fits = len(parts) == len(pattern) and all(p in ("{id}", part) for p, part in zip(pattern, parts, strict=True))
        if fits and route.method == method:
            return route, next((part for p, part in zip(pattern, parts, strict=True) if p == "{id}"), "")
    raise NotFound(f"no control route {method} {path}", code="unknown_route")


def reach(ledger: Ledger, claims: Claims, episode: str) -> str:
    """`episode`, if it exists and `claims` reach it."""
    if claims.episode not in (None, episode):
        raise Forbidden(f"this key is for episode {claims.episode} alone", code="foreign_episode")
    tenant = ledger.tenant_of(episode)
    if tenant is None:
        raise NotFound(f"no episode {episode}", code="unknown_episode")
    if claims.scope != "admin" and claims.tenant != tenant:
        raise Forbidden(f"episode {episode} belongs to another tenant", code="foreign_episode")
    return episode


def _open_episode(asked: _Asked) -> Answer:
    claims, ledger, body = asked.request.claims, asked.ledger, asked.body(OpenEpisode)
    for name in ("task", "model", "agent"):
        _check_length(name, getattr(body, name), MAX_LABEL)
    if claims.episode is not None:
        raise Forbidden(f"this key is for episode {claims.episode} alone: it opens no other", code="foreign_episode")
    episode = check_id(asked.new_id("ep"))
    key = asked.keys(claims.tenant, episode)
    events = ledger.open_episode(body, episode=episode, at=asked.at, tenant=claims.tenant)

    def show() -> Body:
        version = ledger.policy_version(body.model or ledger.only_model())
        out = {
            "episode": episode, "task": body.task, "base_url": f"{asked.base}/e/{episode}/v1", "api_key": key,
            "policy_version": version, "env": environment(asked.base, episode, key, body.task),
        }
        if body.members:
            out["members"] = {
                name: {"model": model, "policy_version": ledger.policy_version(model)}
                for name, model in body.members.items()
            }
        return out

    return Answer(200, events, show)


def environment(base: str, episode: str, key: str, task: str | None) -> dict[str, str]:
    """What a program of this episode is given (contract §3.5)."""
    root = f"{base}/e/{episode}"
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_BASE": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "AJET_PROXY_URL": base,
        "AJET_EPISODE": episode,
        "AJET_TASK": task or "",
    }


def _list_episodes(asked: _Asked) -> Answer:
    query = asked.request.query
    limit = query.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= MAX_RECORDS):
        raise BadRequest(f"limit must be 1 to {MAX_RECORDS}", param="limit")
    wanted = Wanted(int(limit), query.get("state"), query.get("task"), query.get("before"))
    listed = records(asked.ledger, wanted)
    return Answer(200, (), lambda: listed)


def _get_episode(asked: _Asked) -> Answer:
    tokens = _TOKENS.get(asked.request.query.get("tokens", "0"))
    if tokens is None:
        raise BadRequest("tokens must be 0, 1 or timelines", param="tokens")
    episode, ledger = asked.own(), asked.ledger
    if tokens == "none":
        return Answer(200, (), lambda: ledger.record(episode))
    known = ledger.find(episode)
    assert known is not None
    return Answer(200, (), lambda: parts(known, ledger.merge_policy, tokens=tokens))


def _reward(asked: _Asked) -> Answer:
    episode, body = asked.own(), asked.body(Reward)
    _check_length("id", body.id, MAX_ID, least=1)
    _check_length("agent", body.agent, MAX_LABEL)
    _check_length("note", body.note, MAX_WORDS)
    reward_id = asked.new_id("rew") if body.id is None else body.id
    events = asked.ledger.reward(episode, body, reward_id=reward_id, at=asked.at)
    return Answer(200, events, lambda: {"id": reward_id, **_state(asked.ledger, episode)})


def _check_length(name: str, value: str | None, most: int, *, least: int = 0) -> None:
    if value is not None and not least <= len(value) <= most:
        raise BadRequest(f"{name} must have {least} to {most} characters", param=name)


def _seal(asked: _Asked) -> Answer:
    episode, _ = asked.own(), asked.body(Empty)
    return Answer(200, asked.ledger.seal(episode, at=asked.at), lambda: _state(asked.ledger, episode))


def _abort(asked: _Asked) -> Answer:
    episode, body = asked.own(), asked.body(Abort)
    body = Abort(body.reason and body.reason[:MAX_WORDS])  # often an exception's text, and an abort must come through
    return Answer(200, asked.ledger.abort(episode, body, at=asked.at), lambda: _state(asked.ledger, episode))


def _heartbeat(asked: _Asked) -> Answer:
    episode, _ = asked.own(), asked.body(Empty)
    return Answer(200, asked.ledger.heartbeat(episode, at=asked.at), lambda: _state(asked.ledger, episode))


def _state(ledger: Ledger, episode: str) -> dict[str, Any]:
    known = ledger.find(episode)
    assert known is not None
    out = {"episode": episode, "state": known.state, "reward": known.reward()}
    more = {"reason": known.reason, "detail": known.detail}
    return out | {name: value for name, value in more.items() if value is not None}


def _lease(asked: _Asked) -> Answer:
    batch = asked.new_id("batch")
    events = asked.ledger.lease(asked.body(Lease), batch=batch, at=asked.at)
    if not any(isinstance(event, ev.BatchLeased) for event in events):
        return Answer(204, events, lambda: None)
    return Answer(200, events, lambda: {"batch": batch})


def _ack(asked: _Asked) -> Answer:
    events = asked.ledger.ack(asked.id, asked.body(Ack), at=asked.at)
    return Answer(200, events, lambda: _batch(asked))


def _nack(asked: _Asked) -> Answer:
    asked.body(Empty)
    return Answer(200, asked.ledger.nack(asked.id, at=asked.at), lambda: _batch(asked))


def _extend(asked: _Asked) -> Answer:
    events = asked.ledger.extend(asked.id, asked.body(Extend), at=asked.at)
    return Answer(200, events, lambda: _batch(asked))


def _batch(asked: _Asked) -> Body:
    batch = asked.ledger.find_batch(asked.id)
    assert batch is not None
    return {"batch": batch.id, "state": batch.state, "lease_until": batch.lease_until}


def _gate_close(asked: _Asked) -> Answer:
    return Answer(200, asked.ledger.gate_close(asked.body(GateClose), at=asked.at), lambda: _gate(asked))


def _gate_open(asked: _Asked) -> Answer:
    return Answer(200, asked.ledger.gate_open(asked.body(GateOpen), at=asked.at), lambda: _gate(asked))


def _gate(asked: _Asked) -> Body:
    return {"gate": asked.ledger.gate, "in_flight": asked.ledger.in_flight()}


def _policy(asked: _Asked) -> Answer:
    body = asked.body(Policy)

    def show() -> Body:
        version, upstreams = asked.ledger.policy_version(body.model), asked.ledger.upstreams(body.model)
        return {"model": body.model, "policy_version": version, "upstreams": list(upstreams)}

    return Answer(200, asked.ledger.announce(body, at=asked.at), show)


def _status(asked: _Asked) -> Answer:
    return Answer(200, (), asked.ledger.status)


def _overview(asked: _Asked) -> Answer:
    return Answer(200, (), lambda: overview(asked.ledger, asked.at))


_HANDLERS: Mapping[str, Callable[[_Asked], Answer]] = {
    "open_episode": _open_episode,
    "list_episodes": _list_episodes,
    "get_episode": _get_episode,
    "reward": _reward,
    "seal": _seal,
    "abort": _abort,
    "heartbeat": _heartbeat,
    "lease": _lease,
    "ack": _ack,
    "nack": _nack,
    "extend": _extend,
    "gate_close": _gate_close,
    "gate_open": _gate_open,
    "policy": _policy,
    "status": _status,
    "overview": _overview,
}
"""Every route of `ROUTES` but ``events``, which is a stream, and ``ca``, which is a file."""
