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

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.views import Tokens, Wanted, overview, parts, record, records, status
from ajet_sdk import routes
from ajet_sdk.errors import BadRequest, Forbidden
from ajet_sdk.routes import check_id, parse

MAX_RECORDS = 1000
MAX_ID = 200
MAX_LABEL = 1000
MAX_WORDS = 10_000
"""Characters of a note or a reason."""
_TOKENS: Mapping[str, Tokens] = {"0": "none", "1": "all", "timelines": "timelines"}
Body = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Request:
    """``route`` is the name of one of `ROUTES`, ``id`` the one in its path; ``body`` is decoded JSON, None if there was
    none."""

    route: str
    id: str
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
class _Context:
    """A request with all that its handler needs."""

    commands: Commands
    request: Request
    at: float
    new_id: Callable[[str], str]
    keys: Callable[[str, str], str]
    base: str

    @property
    def state(self) -> State:
        return self.commands.state

    @property
    def id(self) -> str:
        return self.request.id

    def body(self, kind: type[Any]) -> Any:
        return parse(kind, self.request.body)

    def own(self) -> str:
        """The episode in the path, if it exists and the caller may reach it."""
        claims, episode = self.request.claims, self.id
        if claims.episode not in (None, episode):
            raise Forbidden(f"this key is for episode {claims.episode} alone", code="foreign_episode")
        if claims.tenant != self.state.episode(episode).tenant and claims.scope != "admin":
            raise Forbidden(f"episode {episode} belongs to another tenant", code="foreign_episode")
        return episode


def handle(
    commands: Commands, request: Request, *, at: float, new_id: Callable[[str], str], keys: Callable[[str, str], str],
    base: str,
) -> Answer:
    """The answer to `request`. `keys` makes the key of a tenant's episode; `base` is the caller's URL of this proxy."""
    return _HANDLERS[request.route](_Context(commands, request, at, new_id, keys, base))


def _open_episode(context: _Context) -> Answer:
    claims, state, body = context.request.claims, context.state, context.body(routes.OpenEpisode)
    for name in ("task", "model", "agent"):
        _check_length(name, getattr(body, name), MAX_LABEL)
    if claims.episode is not None:
        raise Forbidden(f"this key is for episode {claims.episode} alone: it opens no other", code="foreign_episode")
    episode = check_id(context.new_id("ep"))
    key = context.keys(claims.tenant, episode)
    events = context.commands.open_episode(body, episode=episode, at=context.at, tenant=claims.tenant)

    def show() -> Body:
        version = state.policy_version(body.model or state.only_model())
        out = {
            "episode": episode, "task": body.task, "base_url": f"{context.base}/e/{episode}/v1", "api_key": key,
            "policy_version": version, "env": environment(context.base, episode, key, body.task),
        }
        if body.members:
            out["members"] = {
                name: {"model": model, "policy_version": state.policy_version(model)}
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


def _list_episodes(context: _Context) -> Answer:
    query = context.request.query
    limit = query.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= MAX_RECORDS):
        raise BadRequest(f"limit must be 1 to {MAX_RECORDS}", param="limit")
    wanted = Wanted(int(limit), query.get("state"), query.get("task"), query.get("before"))
    listed = records(context.state, wanted)
    return Answer(200, (), lambda: listed)


def _get_episode(context: _Context) -> Answer:
    tokens = _TOKENS.get(context.request.query.get("tokens", "0"))
    if tokens is None:
        raise BadRequest("tokens must be 0, 1 or timelines", param="tokens")
    episode = context.own()
    if tokens == "none":
        return Answer(200, (), lambda: record(context.state, episode))
    return Answer(200, (), lambda: parts(context.state, episode, tokens=tokens))


def _reward(context: _Context) -> Answer:
    episode, body = context.own(), context.body(routes.Reward)
    _check_length("id", body.id, MAX_ID, least=1)
    _check_length("agent", body.agent, MAX_LABEL)
    _check_length("note", body.note, MAX_WORDS)
    reward_id = context.new_id("rew") if body.id is None else body.id
    events = context.commands.reward(episode, body, reward_id=reward_id, at=context.at)
    return Answer(200, events, lambda: {"id": reward_id, **_state(context.state, episode)})


def _check_length(name: str, value: str | None, most: int, *, least: int = 0) -> None:
    if value is not None and not least <= len(value) <= most:
        raise BadRequest(f"{name} must have {least} to {most} characters", param=name)


def _seal(context: _Context) -> Answer:
    episode, _ = context.own(), context.body(routes.Empty)
    return Answer(200, context.commands.seal(episode, at=context.at), lambda: _state(context.state, episode))


def _abort(context: _Context) -> Answer:
    episode, body = context.own(), context.body(routes.Abort)
    body = routes.Abort(body.reason and body.reason[:MAX_WORDS])  # often an exception's text: it is cut, not refused
    return Answer(200, context.commands.abort(episode, body, at=context.at), lambda: _state(context.state, episode))


def _heartbeat(context: _Context) -> Answer:
    episode, _ = context.own(), context.body(routes.Empty)
    return Answer(200, context.commands.heartbeat(episode, at=context.at), lambda: _state(context.state, episode))


def _state(state: State, episode: str) -> dict[str, Any]:
    known = state.episode(episode)
    out = {"episode": episode, "state": known.state, "reward": known.reward()}
    more = {"reason": known.reason, "detail": known.detail}
    return out | {name: value for name, value in more.items() if value is not None}


def _lease(context: _Context) -> Answer:
    batch = context.new_id("batch")
    events = context.commands.lease(context.body(routes.Lease), batch=batch, at=context.at)
    if not any(isinstance(event, ev.BatchLeased) for event in events):
        return Answer(204, events, lambda: None)
    return Answer(200, events, lambda: {"batch": batch})


def _ack(context: _Context) -> Answer:
    events = context.commands.ack(context.id, context.body(routes.Ack), at=context.at)
    return Answer(200, events, lambda: _batch(context))


def _nack(context: _Context) -> Answer:
    context.body(routes.Empty)
    return Answer(200, context.commands.nack(context.id, at=context.at), lambda: _batch(context))


def _extend(context: _Context) -> Answer:
    events = context.commands.extend(context.id, context.body(routes.Extend), at=context.at)
    return Answer(200, events, lambda: _batch(context))


def _batch(context: _Context) -> Body:
    batch = context.state.batch(context.id)
    return {"batch": batch.id, "state": batch.state, "lease_until": batch.lease_until}


def _gate_close(context: _Context) -> Answer:
    events = context.commands.gate_close(context.body(routes.GateClose), at=context.at)
    return Answer(200, events, lambda: _gate(context))


def _gate_open(context: _Context) -> Answer:
    events = context.commands.gate_open(context.body(routes.GateOpen), at=context.at)
    return Answer(200, events, lambda: _gate(context))


def _gate(context: _Context) -> Body:
    return {"gate": context.state.gate, "in_flight": context.state.calls["running"]}


def _policy(context: _Context) -> Answer:
    body = context.body(routes.Policy)

    def show() -> Body:
        version, upstreams = context.state.policy_version(body.model), context.state.upstreams(body.model)
        return {"model": body.model, "policy_version": version, "upstreams": list(upstreams)}

    return Answer(200, context.commands.announce(body, at=context.at), show)


def _status(context: _Context) -> Answer:
    return Answer(200, (), lambda: status(context.state))


def _overview(context: _Context) -> Answer:
    return Answer(200, (), lambda: overview(context.state, context.at))


_HANDLERS: Mapping[str, Callable[[_Context], Answer]] = {
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
