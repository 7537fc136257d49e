"""The control plane as a function: a request and the ledger in, an answer and the events that make it true out.

Nothing changes here, but that a client's beat is noted. The caller commits `Answer.events` and only then calls
`Answer.body`, which is made at that moment and so shows the state after the events. Waiting (leases, the gate) and
encoding belong to `ajet_proxy.io.control.routes`.

Invariant: a caller sees and changes only what its claims reach. A key of scope ``agent`` reaches one episode, or those
of its tenant; scope ``admin`` reaches all. Whether a scope reaches a route at all is checked before this function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ajet_proxy.core.identity.headers import MAX_LABEL
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.views import Tokens, Wanted, mix, overview, parts, records, status, wanted
from ajet_sdk import routes
from ajet_sdk.errors import BadRequest, Forbidden, NotFound
from ajet_sdk.routes import MAX_CLIENT_TEXT, check_id, parse, route

MAX_RECORDS = 1000
MAX_ID = 200
MAX_DIGITS = 9
MAX_WORDS = 10_000
"""Characters of a note or a reason."""
OF_A_MODEL = frozenset(("lease", "gate_close", "gate_open", "policy", "trainers", "evaluate", "set_mix"))
"""Routes whose body names a model."""
OF_ALL_MODELS = frozenset(("flush", "supervise"))
"""Routes of trainers that change what other models learn, too."""
_TOKENS: Mapping[str, Tokens] = {"0": "none", "1": "all", "timelines": "timelines"}
Body = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Request:
    """``route`` is the name of one of `ROUTES`, ``id`` the one in its path; ``body`` is decoded JSON, None if there was
    none. ``trainer`` is the process of a trainer that asks, if it says so."""

    route: str
    id: str
    query: Mapping[str, str]
    body: Any
    claims: Claims
    trainer: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """``body`` makes the JSON object to answer with; call it after the events are committed. An iterator in it stands
    for a list whose items are written one by one, and a function for what it returns. ``status`` is 204 for a lease
    that found nothing."""

    body: Callable[[], Body]
    events: tuple[Event, ...] = ()
    status: int = 200


def of_own_model(request: Request) -> Request:
    """`request` as one for the model of its key, if that has one and the request names none. Raises `Forbidden` if it
    is for another's."""
    own, body = request.claims.model, {} if request.body is None else request.body
    if not own or not isinstance(body, Mapping):
        return request
    if request.route in OF_ALL_MODELS:
        raise Forbidden(f"this key is for model {own!r} alone, and this concerns others too", code="foreign_model")
    if request.route not in OF_A_MODEL:
        return request
    _check_own(own, own if body.get("model") is None else body["model"])
    return replace(request, body={**body, "model": own})


def _check_own(own: str, model: Any) -> None:
    """`Forbidden` for a key whose `own` model is another one."""
    if own not in ("", model):
        raise Forbidden(f"this key is for model {own!r} alone", code="foreign_model", param="model")


def handle(
    commands: Commands, request: Request, *, at: float, new_id: Callable[[str], str], keys: Callable[[str, str], str],
    base: str, before: tuple[Event, ...] = (),
) -> Answer:
    """The answer to `request`. `keys` makes the key of a tenant's episode; `base` is the caller's URL of this proxy.
    If the answer's events are a `Part`, they are applied, and `request` is given again with all the events `before`."""
    request, kind = of_own_model(request), route(request.route).body
    body = None if kind is None else parse(kind, request.body)
    handler: Callable[[], Answer] = getattr(
        _Handlers(commands, request, body, at, new_id, keys, base, before), request.route
    )
    return handler()


@dataclass(frozen=True, slots=True)
class _Handlers:
    """A request with all that it takes to answer it. Each route of `ROUTES` has a method of its name, except
    ``events``, which is a stream, and ``ca``, which is a file."""

    commands: Commands
    request: Request
    body: Any
    at: float
    new_id: Callable[[str], str]
    keys: Callable[[str, str], str]
    base: str
    before: tuple[Event, ...]

    @property
    def state(self) -> State:
        return self.commands.state

    # -- episodes

    def open_episode(self) -> Answer:
        claims, state, body = self.request.claims, self.state, self.body
        for name in ("task", "model", "agent"):
            _check_length(name, getattr(body, name), MAX_LABEL)
        _check_length("revision", body.revision, MAX_CLIENT_TEXT)
        _check_team(body)
        self._whole_tenant("it opens no other")
        episode = check_id(self.new_id("ep") if body.id is None else body.id, "id")
        key = self.keys(claims.tenant, episode)
        events = self.commands.open_episode(body, episode=episode, at=self.at, tenant=claims.tenant)

        def show() -> Body:
            version = state.policy_version(body.model or state.only_model())
            out = {
                "episode": episode, "task": body.task, "base_url": f"{self.base}/e/{episode}/v1", "api_key": key,
                "policy_version": version, "env": environment(self.base, episode, key, body.task),
            }
            for kind in ("members", "teachers"):
                if given := getattr(body, kind):
                    out[kind] = {
                        name: {"model": model, "policy_version": state.policy_version(model)}
                        for name, model in given.items()
                    }
            return out

        return Answer(show, events)

    def list_episodes(self) -> Answer:
        query = self.request.query
        limit = query.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= MAX_RECORDS):
            raise BadRequest(f"limit must be 1 to {MAX_RECORDS}", param="limit")
        wanted = Wanted(int(limit), query.get("state"), query.get("task"), query.get("before"))
        return Answer(lambda: records(self.state, wanted))

    def get_episode(self) -> Answer:
        tokens = _TOKENS.get(self.request.query.get("tokens", "0"))
        if tokens is None:
            raise BadRequest("tokens must be 0, 1 or timelines", param="tokens")
        episode = self._own()
        return Answer(lambda: parts(self.state, episode, tokens=tokens))

    def reward(self) -> Answer:
        episode, body = self._own(), self.body
        _check_length("id", body.id, MAX_ID, least=1)
        _check_length("agent", body.agent, MAX_LABEL)
        _check_length("model", body.model, MAX_LABEL, least=1)
        _check_length("state", body.state, MAX_LABEL, least=1)
        _check_length("note", body.note, MAX_WORDS)
        reward_id = self.new_id("rew") if body.id is None else body.id
        events = self.commands.reward(episode, body, reward_id=reward_id, at=self.at)
        return Answer(lambda: {"id": reward_id, **self._episode()}, events)

    def seal(self) -> Answer:
        return Answer(self._episode, self.commands.seal(self._own(), at=self.at))

    def abort(self) -> Answer:
        reason = self.body.reason  # often an exception's text: it is cut, not refused
        body = routes.Abort(reason and reason[:MAX_WORDS], self.body.cause)
        return Answer(self._episode, self.commands.abort(self._own(), body, at=self.at))

    def heartbeat(self) -> Answer:
        return Answer(self._episode, self.commands.heartbeat(self._own(), at=self.at))

    def _own(self) -> str:
        """The episode in the path, if it exists and the caller may reach it."""
        claims, episode = self.request.claims, self.request.id
        if claims.episode not in (None, episode):
            raise Forbidden(f"this key is for episode {claims.episode} alone", code="foreign_episode")
        if claims.tenant != self.state.episode(episode).tenant and claims.scope != "admin":
            raise Forbidden(f"episode {episode} belongs to another tenant", code="foreign_episode")
        return episode

    def _episode(self) -> dict[str, Any]:
        known = self.state.episode(self.request.id)
        out = {"episode": known.id, "state": known.state, "reward": known.reward()}
        more = {"reason": known.reason, "detail": known.detail}
        return out | {name: value for name, value in more.items() if value is not None}

    # -- batches

    def lease(self) -> Answer:
        self._check_model()
        batch = self.new_id("batch")
        events = self.commands.lease(self.body, batch=batch, at=self.at)
        if not any(isinstance(event, ev.BatchLeased) for event in events):
            return Answer(lambda: None, events, 204)
        return Answer(lambda: {"batch": batch}, events)

    def ack(self) -> Answer:
        return Answer(self._batch, self.commands.ack(self._own_batch(), self.body, at=self.at))

    def nack(self) -> Answer:
        return Answer(self._batch, self.commands.nack(self._own_batch(), at=self.at))

    def extend(self) -> Answer:
        return Answer(self._batch, self.commands.extend(self._own_batch(), self.body, at=self.at))

    def _own_batch(self) -> str:
        """The batch in the path, if it exists and is of a model that the caller may train."""
        batch = self.state.batch(self.request.id)
        _check_own(self.request.claims.model, batch.model)
        self.commands.trainers.check(batch.model, self.request.trainer)
        return batch.id

    def _batch(self) -> Body:
        batch = self.state.batch(self.request.id)
        return {"batch": batch.id, "state": batch.state, "lease_until": batch.lease_until}

    def flush(self) -> Answer:
        _check_length("lane", self.body.lane, MAX_LABEL)
        _check_length("task", self.body.task, MAX_LABEL)
        ended = len(self.state.progress.unended(self.body.lane, self.body.task))
        return Answer(lambda: {"tasks": ended}, self.commands.flush(self.body, at=self.at))

    # -- the mix

    def mix(self) -> Answer:
        return self._mix(self._asked_model())

    def set_mix(self) -> Answer:
        self._check_model()
        return self._mix(self.body.model, self.commands.set_mix(self.body, at=self.at))

    def drop_mix(self) -> Answer:
        model = self._asked_model()
        return self._mix(model, self.commands.drop_mix(model, at=self.at))

    def _asked_model(self) -> str:
        """The model in the query, or that of the key."""
        own = self.request.claims.model
        model = self.request.query.get("model", own)
        _check_own(own, model)
        _check_length("model", model, MAX_LABEL)
        return model

    def _mix(self, model: str | None, events: tuple[Event, ...] = ()) -> Answer:
        return Answer(lambda: mix(self.state, model or self.state.whose_mix()), events)

    # -- weights

    def gate_close(self) -> Answer:
        self._check_model()
        return Answer(self._gate, self.commands.gate_close(self.body, at=self.at))

    def gate_open(self) -> Answer:
        self._check_model()
        return Answer(self._gate, self.commands.gate_open(self.body, at=self.at))

    def _check_model(self) -> None:
        _check_length("model", self.body.model, MAX_LABEL)
        self.commands.trainers.check(self.body.model or self.state.only_model(), self.request.trainer)

    def _gate(self) -> Body:
        model = self.body.model or ""
        state = self.state.gate_state(model) if model else self.state.gate
        return {"gate": state, "in_flight": self.state.in_flight(model)}

    def policy(self) -> Answer:
        self._check_model()
        _check_length("run", self.body.run, MAX_CLIENT_TEXT, least=1)
        model, events = self.body.model, self.commands.announce(self.body, at=self.at)

        def show() -> Body:
            version, upstreams = self.state.policy_version(model), self.state.upstreams(model)
            out = {"model": model, "policy_version": version, "upstreams": list(upstreams)}
            return out | (self._run(events) if self.body.run else {})

        return Answer(show, events)

    def trainers(self) -> Answer:
        for name, most in (("model", MAX_LABEL), ("host", MAX_LABEL), ("folder", MAX_WORDS)):
            _check_length(name, getattr(self.body, name), most)
        for name in ("run", "instance"):
            _check_length(name, getattr(self.body, name), MAX_CLIENT_TEXT, least=1)
        events = self.commands.trainers.attend(self.body, at=self.at)
        return Answer(lambda: {"model": self.body.model} | self._run(events), events)

    def _run(self, events: tuple[Event, ...]) -> dict[str, Any]:
        """Which run has the model, and what of another one goes with `events`."""
        all_events = *self.before, *events
        discarded = sum(isinstance(event, ev.EpisodeDiscarded) for event in all_events)
        void = sum(isinstance(event, ev.BatchReturned) for event in all_events)
        return {"run": self.state.born(self.body.model).run or None, "discarded": discarded, "void": void}

    # -- evaluations

    def evaluate(self) -> Answer:
        name = check_id(self.new_id("eval") if self.body.id is None else self.body.id, "id")
        self._check_model()
        events = self.commands.evaluate(self.body, evaluation=name, at=self.at)
        known = self.state.evaluation(name)
        version = self.state.policy_version(self.body.model) if known is None else known.policy_version
        return Answer(lambda: {"evaluation": name, "policy_version": version}, events)

    def evaluation(self) -> Answer:
        name = self.request.id
        known = self.state.evaluation(name)
        if known is None:
            raise NotFound(f"no evaluation {name}, or there is a later one of its model", code="unknown_evaluation")
        _check_own(self.request.claims.model, known.model)
        return Answer(known.to_json)

    def wanted(self) -> Answer:
        self._whole_tenant("it does not say what is wanted")

        def show() -> Body:
            missing = self.state.wanted()
            nexts = {model: self.state.evaluations[model].next for model in missing}
            return {"eval": missing, "next": nexts} | wanted(self.state)

        return Answer(show)

    # -- plays

    def play(self) -> Answer:
        name, tenant = check_id(self.body.name, "name"), self._tenant()
        events = self.commands.play(self.body, tenant=tenant, at=self.at)
        return Answer(lambda: self.state.play(tenant, name).to_json(), events)

    def get_play(self) -> Answer:
        known, after = self.state.play(self._tenant(), self.request.id), self.request.query.get("after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > MAX_DIGITS or not after.isascii():
            raise BadRequest("after must be a place", param="after")
        return Answer(lambda: known.to_json(int(after)))

    def end_play(self) -> Answer:
        known = self.state.play(self._tenant(), self.request.id)
        return Answer(known.to_json, self.commands.end_play(known.name, tenant=known.tenant, at=self.at))

    def _tenant(self) -> str:
        """Whose plays these are."""
        self._whole_tenant("it has no plays")
        return self.request.claims.tenant

    # -- clients

    def join(self) -> Answer:
        self._whole_tenant("no client joins with it")
        for name in ("name", "lane", "revision"):
            _check_length(name, getattr(self.body, name), MAX_CLIENT_TEXT, least=1)
        name = check_id(self.new_id("client") if self.body.id is None else self.body.id, "id")
        events = self.commands.clients.join(self.body, client=name, tenant=self.request.claims.tenant, at=self.at)
        return Answer(lambda: self._client(name), events)

    def clients(self) -> Answer:
        self._whole_tenant("it sees no clients")
        claims = self.request.claims
        tenant = None if claims.scope == "admin" else claims.tenant
        at = max(self.at, self.state.now)
        return Answer(lambda: {"now": at, "clients": self.commands.clients.shown(tenant, at)})

    def beat(self) -> Answer:
        self.commands.clients.beat(self._own_client(), at=self.at)
        return Answer(lambda: self._client(self.request.id))

    def leave(self) -> Answer:
        return Answer(
            lambda: self._client(self.request.id), self.commands.clients.leave(self._own_client(), at=self.at)
        )

    def _own_client(self) -> str:
        """The client in the path, if it is known and the caller may reach it."""
        self._whole_tenant("it is no client's")
        claims, client = self.request.claims, self.commands.clients.known(self.request.id)
        if claims.tenant != client.tenant and claims.scope != "admin":
            raise Forbidden(f"client {client.id} is another tenant's", code="foreign_client")
        return client.id

    def _client(self, name: str) -> dict[str, Any]:
        client = self.commands.clients.known(name)
        state = "joined" if client.reason is None else "gone"
        return {"client": client.id, "name": client.name, "ttl_s": client.ttl_s, "state": state}

    def _whole_tenant(self, why: str) -> None:
        """Refuses the key of one episode."""
        if (episode := self.request.claims.episode) is not None:
            raise Forbidden(f"this key is for episode {episode} alone: {why}", code="foreign_episode")

    # -- all of it

    def status(self) -> Answer:
        return Answer(lambda: status(self.state, self.commands.leads))

    def overview(self) -> Answer:
        return Answer(lambda: overview(self.state, self.at))


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


def _check_team(body: routes.OpenEpisode) -> None:
    """Refuses members and teachers that cannot be told apart, or have no name or model."""
    members, teachers = body.members or {}, body.teachers or {}
    for kind, given in (("members", members), ("teachers", teachers)):
        for text in (*given, *given.values()):
            _check_length(kind, text, MAX_LABEL, least=1)
    for name, model in teachers.items():
        if name in members:
            raise BadRequest(f"{name!r} is a member and a teacher: which of them?", param="teachers")
        if model in (body.model, *members.values()):
            message = f"the calls of teacher {name!r} are never trained, and others learn as {model!r}: name another"
            raise BadRequest(message, param="teachers")


def _check_length(name: str, value: str | None, most: int, *, least: int = 0) -> None:
    if value is not None and not least <= len(value) <= most:
        raise BadRequest(f"{name} must have {least} to {most} characters", param=name)
