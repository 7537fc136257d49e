"""The control routes on the wire: authentication, decoding, waiting, answering.

What a route means is decided by `ajet_proxy.core.control.api`, a function of the request and the ledger. This module
does what needs a socket or a clock. It finds the caller's claims and decodes the body. It commits the events that the
core returned before it answers (contract §13). It repeats a lease, when another look may find more, until something is
ready or the wait is over.

Invariant: no answer leaves before its events are on disk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from msgspec.structs import asdict
from yarl import URL

from ajet_proxy.core.control import api
from ajet_proxy.core.control.runs import RUN_ROUTES
from ajet_proxy.core.identity.keys import Claims, Keys, check_scope, key_in
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.commands import paced
from ajet_proxy.core.ledger.events import CallFinished, Event
from ajet_proxy.core.ledger.parts import Part
from ajet_proxy.io.control import gauges
from ajet_proxy.io.control.answers import LOOKS, Answers
from ajet_proxy.io.control.pace import Pace
from ajet_proxy.io.control.runs import RunsPort
from ajet_proxy.io.engines.pause import EngineControl
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.http import body as body_of
from ajet_proxy.io.http import tls
from ajet_proxy.io.http.aiohttp_internals import PATIENCE_S
from ajet_proxy.io.http.audit import BEGUN, SUBJECT
from ajet_proxy.io.intercept.tunnels import Interception
from ajet_proxy.io.ledger_port.gatekeeper import RETRY_AFTER_S, Gatekeeper, Requests
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import CONTENT_TYPE, Metrics
from ajet_proxy.io.storage.store import Store
from ajet_proxy.io.workers.supervisor import Workers
from ajet_proxy.own_address import Address, leads_here
from ajet_proxy.settings import Config
from ajet_sdk import frame, routes
from ajet_sdk.errors import BadRequest, NotFound, NotReady, Unauthorized
from ajet_sdk.page import live_page
from ajet_sdk.routes import PREFIX, ROUTES, Route, parse

PAGE = "/ajet/"
MAX_WAIT_S = 3600.0
KEY_TTL_S = 7 * 86400.0
"""An episode's key lives this long, or as long as the episode may be open."""
MAX_OPENING = 64 << 10
"""What an episode was opened with is kept as long as it is."""
PAUSE = 4.0
"""A lease that looked in vain looks again no sooner than after so many times as long: others need the processor too."""
HOLD_S = 15.0
"""An episode that a lane has no room for is held so long, and then refused, before its client takes us for dead."""


class Control:
    """The handlers of ``/ajet/v1/*`` and ``/metrics``."""

    def __init__(
        self, *, store: Store, keys: Keys, gate: Gatekeeper, engines: Engines, engine_control: EngineControl,
        clock: Clock, metrics: Metrics, interception: Interception | None, workers: Workers | None, config: Config,
        budget: MemoryBudget, listening: Collection[Address],
    ) -> None:
        """`listening` holds the addresses at which the daemon listens; they are read at each request."""
        self._listening = listening
        self._budget = budget
        self._interception = interception
        self._workers = workers
        self._store = store
        self._keys = keys
        self._gate = gate
        self._engines = engines
        self._engine_control = engine_control
        self._clock = clock
        self._metrics = metrics
        self._config = config
        self._stopping = asyncio.Event()
        self._answers = Answers()
        self._pace = Pace(store.state.room, store.state.lacking, self._watch)
        self._runs = RunsPort(store, clock)

    async def close(self, _app: web.Application) -> None:
        """Let go of the thread that makes answers."""
        self._answers.close()

    def stop(self) -> None:
        """End the waits of trainers, of event readers and of those who open episodes, so that the daemon can end."""
        self._stopping.set()
        self._pace.stop()
        self._runs.stop()

    def add_routes(self, app: web.Application) -> None:
        """Register every control route, and refuse what else lies under ``/ajet``."""
        for route in ROUTES:
            path = PREFIX + route.path
            app.router.add_route(route.method, path, self._handler(route), expect_handler=body_of.unasked)
        app.on_cleanup.append(self.close)
        app.router.add_get("/metrics", self._metrics_page, expect_handler=body_of.unasked)
        self._add_page(app)
        app.router.add_route("*", "/ajet{tail:(/.*)?}", _unknown, expect_handler=body_of.unasked)

    def _add_page(self, app: web.Application) -> None:
        """``/ajet/``: the owner's page, one document that asks the control routes for all it shows.

        A browser cannot send a key with an address, and a key in an address would end in histories and logs. So a
        caller without a key is answered 401 with the page itself, which holds no data. The page asks for a key, keeps
        it in its own tab and sends it as a header. A program that takes no HTML gets the usual error.

        Invariant: the page is the same for everyone. Its headers forbid other sites to frame it, and it may ask no
        other site.
        """
        page, policy = live_page()
        headers = {
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

        async def show(http: web.Request) -> web.Response:
            status = 200
            try:
                check_scope(self._claims(http), "admin")
            except Unauthorized:
                if "text/html" not in http.headers.get("Accept", ""):
                    raise
                status = 401
            return web.Response(text=page, status=status, content_type="text/html", headers=headers)

        async def without_slash(_http: web.Request) -> web.Response:
            return web.Response(status=308, headers={"Location": PAGE})

        app.router.add_get(PAGE, show, expect_handler=body_of.unasked)
        app.router.add_get(PAGE.rstrip("/"), without_slash, expect_handler=body_of.unasked)

    def _handler(self, route: Route) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            claims = self._claims(http)
            check_scope(claims, route.scope)
            if self._config.tls_client_ca is not None and route.scope == "trainer":
                tls.demand(http)
            most = MAX_OPENING if route.name == "open_episode" else body_of.MAX_CONTROL
            body = await self._decode(http, most) if route.body is not None else None
            asked = api.Request(
                route.name, http.match_info.get("id", ""), dict(http.query), body, claims,
                http.headers.get(routes.HEADER_TRAINER, ""),
            )
            request = api.of_own_model(asked)
            if route.name in RUN_ROUTES:
                return _response(await self._runs.answer(request))
            match route.name:
                case "open_episode":
                    return await self._open_episode(http, request)
                case "lease":
                    return await self._lease(http, request)
                case "gate_close":
                    return await self._close_gate(http, request)
                case "gate_open":
                    return await self._open_gate(http, request)
                case "events":
                    return await self._events(http)
                case "status":
                    return web.json_response(self._status(http, self._decide(request, "").body() or {}))
                case "ca":
                    return self._certificate()
                case "policy":
                    await self._check_upstreams(request)
            answer = await self._ask(http, request)
            if route.name in LOOKS:
                return await self._answers.look(http, answer)
            if (made := {"open_episode": "episode", "join": "client"}.get(route.name)) is not None:
                http[SUBJECT] = (answer.body() or {}).get(made, "")
            return _response(answer)

        return handle

    def _claims(self, http: web.Request) -> Claims:
        return self._keys.authenticate(key_in(http.headers), self._clock.now())

    async def _decode(self, http: web.Request, most: int) -> Any:
        """The JSON body of at most `most` bytes; None if there is none. Raises `BadRequest` for what is not JSON. What
        the body may hold, `ajet_sdk.routes.parse` checks."""
        most = min(self._config.max_body, most)
        raw = await body_of.read(http, max_body=most, limit_s=PATIENCE_S, budget=self._budget)
        if not raw.strip():
            return None
        try:
            return json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error

    async def _ask(self, http: web.Request, request: api.Request) -> api.Answer:
        """The core's answer to `request`. Unless it is a ``GET``, its events and all earlier ones are on disk first."""
        answer, before = self._decide(request, self._base_url(http)), tuple[Event, ...]()
        while isinstance(answer.events, Part):
            before += answer.events
            await self._store.commit(answer.events)
            answer = self._decide(request, self._base_url(http), before)
        if http.method != "GET":
            await self._store.commit(answer.events)
        return answer

    def _decide(self, request: api.Request, base: str, before: tuple[Event, ...] = ()) -> api.Answer:
        return api.handle(
            self._store.commands, request, at=self._clock.now(), new_id=self._clock.new_id, keys=self._issue, base=base,
            before=before,
        )

    def _issue(self, tenant: str, episode: str) -> str:
        """A key for one episode. It expires by our clock; a command revokes it by the clock of this machine."""
        expires = self._clock.now() + max(KEY_TTL_S, self._config.wall_timeout)
        return self._keys.issue(Claims("agent", tenant, episode, expires, self._clock.wall()))

    def _base_url(self, http: web.Request) -> str:
        """The base URL under which this caller reaches the proxy, without a trailing slash."""
        if self._config.public_url:
            return self._config.public_url.rstrip("/")
        scheme, host = http.scheme, http.host
        if self._config.trusted_front:
            scheme = http.headers.get("X-Forwarded-Proto", scheme)
            host = http.headers.get("X-Forwarded-Host", host)
        return f"{scheme}://{host}"

    async def _lease(self, http: web.Request, request: api.Request) -> web.Response:
        """A batch as one MessagePack frame, or 204 when nothing became ready in ``wait_s``.

        The frame is made in a thread: leased episodes do not change, and millions of tokens take a while.
        """
        _check_wire(http)
        wanted = parse(routes.Lease, request.body)
        deadline = self._clock.now() + min(max(wanted.wait_s, 0.0), MAX_WAIT_S)
        while True:
            seen, began = self._store.state.leasable(), self._clock.now()
            answer = self._decide(request, "")
            took = self._clock.now() - began
            if answer.events:
                await self._store.commit(answer.events)
            if answer.status != 204:
                break
            if answer.events and not self._stopping.is_set():  # what was dropped may have stood before a group
                continue
            left = deadline - self._clock.now()
            if left <= 0 or self._stopping.is_set():
                return web.Response(status=204)
            again = self._store.commands.next_end(wanted, at=self._clock.now())
            await self._until_stop(self._store.leasable(seen, min(left, again)))
            await asyncio.sleep(min(left, PAUSE * took))
        batch = http[SUBJECT] = str((answer.body() or {})["batch"])
        data = await asyncio.to_thread(lambda: frame.encode_batch(views.batch(self._store.state, batch)))
        return web.Response(body=data, content_type=frame.CONTENT_TYPE)

    async def _open_episode(self, http: web.Request, request: api.Request) -> web.StreamResponse:
        """An episode is opened once its lane has room for it. What is wrong with it is said before, and who has it
        already has it again."""
        asked = parse(routes.OpenEpisode, request.body)
        self._check_engines(request, asked)
        state = self._store.state
        where = paced(state, self._decide(request, "").events) if state.paced() else None
        if where is not None:
            group_key, models = where
            wanted = HOLD_S if asked.hold_s is None else max(0.0, asked.hold_s)
            hold_s = min(wanted, HOLD_S, self._config.gate_hold_s)
            name = None if asked.id is None else (request.claims.tenant, asked.id)
            if not await self._pace.enter(group_key, hold_s, models, name):
                said = f"lane {group_key.lane!r} has as many groups open or ready as may be ahead of what is leased"
                raise NotReady(said, code="lane_full", retry_after=1.0)
        try:
            answer = await self._ask(http, request)
        finally:
            self._pace.changed()  # the room is somebody else's, if it was not taken
        http[SUBJECT] = (answer.body() or {}).get("episode", "")
        return _response(answer)

    def _check_engines(self, request: api.Request, body: routes.OpenEpisode) -> None:
        """`NotReady` if a member or teacher has a model that no engine serves: it is misspelt, or its trainer has yet
        to announce it."""
        agents = {model: name for name, model in {**(body.members or {}), **(body.teachers or {})}.items()}
        if (model := self._engines.lacks(agents)) is not None:
            self._decide(request, "")  # what is wrong with the request is said first
            known = ", ".join(map(repr, self._engines.names())) or "none yet"
            said = f"no engine serves {model!r}, the model of {agents[model]!r}; there are engines for {known}"
            raise NotReady(said, code="no_engine", retry_after=1.0)

    async def _close_gate(self, http: web.Request, request: api.Request) -> web.Response:
        """Hold new calls; then freeze the engines or wait for the calls in flight, as configured. An engine that serves
        another model too is not frozen, since calls of that one would wait. Nor is one that the named model does not
        have, such as a teacher's: its weights stay, and it may be unable to."""
        wanted = parse(routes.GateClose, request.body)
        await self._ask(http, request)
        behind = partial(self._engines.guards, wanted.model or "")
        if self._config.gate_mode == "pause" and not self._engines.shares(wanted.model or ""):
            own = self._engines.of(wanted.model) if wanted.model else ()
            await self._engine_control.pause(own or self._engines.behind(wanted.model or ""))
        elif not await self._gate.drained(min(max(wanted.wait_s, 0.0), MAX_WAIT_S), behind):
            count = self._gate.inside(behind)
            raise NotReady(
                f"the gate is closing: {count} calls are still in flight; ask again", code="gate_closing",
                retry_after=RETRY_AFTER_S,
            )
        return web.json_response({"gate": "closed", "in_flight": self._gate.inside(behind)})

    async def _check_upstreams(self, request: api.Request) -> None:
        """Raises `BadRequest` for an engine at an address of ours."""
        for url in parse(routes.Policy, request.body).upstreams or ():
            if await asyncio.to_thread(leads_here, url, tuple(self._listening), self._config.public_url):
                raise BadRequest(
                    f"upstream {url[:200]!r} is the proxy's own address: give that of the engine", code="own_address",
                    param="upstreams",
                )

    async def _open_gate(self, http: web.Request, request: api.Request) -> web.Response:
        """Let requests through, and wake the engines if they were frozen. Requests wait in a frozen engine until then.
        Where the trainer has woken its engine already, they need not wait for us. The new version is set before the
        first token that it samples. Opening an open gate wakes the engines again, but none that another model keeps
        frozen."""
        wanted = parse(routes.GateOpen, request.body)
        answer = await self._ask(http, request)
        if self._workers is not None:
            await self._workers.caught_up()
        faults: list[str] = []
        if self._config.gate_mode == "pause":
            engines, own = self._engines, wanted.model or ""
            freezing = (gate for gate in self._store.state.shut() if not engines.shares(gate))
            frozen = {url for gate in freezing for url in engines.behind(gate)}
            urls = tuple(url for url in engines.behind(own) if url not in frozen)
            version = None if engines.shares(own) else wanted.policy_version
            faults = await self._engine_control.resume(urls, version)
        return web.json_response((answer.body() or {}) | ({"not_resumed": faults} if faults else {}))

    def _status(self, http: web.Request, known: dict[str, Any]) -> dict[str, Any]:
        """The ledger's status, with what only this process knows: its engines and who waits. ``any_model`` has the
        engines for each model that has none of its own."""
        models = {name: self._model(name) for name in self._engines.names()}
        others = {"any_model": models.pop("")} if "" in models else {}
        now: dict[str, Any] = {"requests": _figures(self._gate)}
        limits = self._store.limits
        now["journal"] = {"healthy": self._store.healthy, "refused": {} if limits is None else limits.refused()}
        now["alerts"] = [*self._store.alerts().values(), *self._held_alerts()]
        if self._interception is not None:
            now["intercept"] = self._interception.to_json(URL(self._base_url(http)).host)
        return known | {"models": models} | others | now

    def _watch(self, waits: bool) -> None:
        """While anybody `waits` for room, each event may make some."""
        (self._store.listen if waits else self._store.unlisten)(self._look)

    def _look(self, _events: Sequence[Event]) -> None:
        self._pace.changed()

    def _held_alerts(self) -> Iterator[str]:
        """Lanes in which agents wait for room that nobody makes."""
        for lane, models in self._pace.full():
            mixes = [one.mix for one in self._store.state.directions(models)]
            if all(mix.shares and not mix.shares.get(lane) for mix in mixes):
                yield f"agents wait to play lane {lane!r}, which has no share in the mix (ajet mix)"

    def _model(self, name: str) -> dict[str, Any]:
        """Which weights serve a model, its gate, and the requests that count as its own."""
        state, gate = self._store.state, "open"
        if not self._gate.is_open(name):
            several = len(state.served) > 1
            gate = ("closing" if self._gate.of(name).in_flight else "closed") if several else state.gate
        urls = list(self._engines.of(name))
        version = state.policy_version(name)
        return {"policy_version": version, "gate": gate, "upstreams": urls} | _figures(self._gate.of(name))

    def _certificate(self) -> web.Response:
        """What a program must trust to be intercepted."""
        if self._interception is None:
            raise NotFound("this proxy intercepts nothing: start it with --intercept", code="no_interception")
        return web.Response(body=self._interception.certificate, content_type="application/x-pem-file")

    async def _events(self, http: web.Request) -> web.StreamResponse:
        """Every event from now on as server-sent events, without token ids."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(http)
        http[BEGUN](response.status)
        await response.write(b": events from now on\n\n")

        async def stream() -> None:
            async for event in self._store.subscribe():
                data = json.dumps(event_json(event))
                await response.write(f"event: {type(event).__name__}\ndata: {data}\n\n".encode())
                await asyncio.sleep(0)  # a thousand events at once are told in turn with what others ask

        await self._until_stop(stream())
        return response

    async def _until_stop(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` to its end, or until the daemon stops."""
        loop = asyncio.get_running_loop()
        tasks = (loop.create_task(work), loop.create_task(self._stopping.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _metrics_page(self, http: web.Request) -> web.Response:
        """Prometheus text. A peer on this machine needs no key, if there is no trusted front; others an admin's."""
        if http.remote not in ("127.0.0.1", "::1", "::ffff:127.0.0.1") or self._config.trusted_front:
            check_scope(self._claims(http), "admin")
        read = gauges.read(
            self._store, self._gate, self._engines, {} if self._workers is None else self._workers.pids()
        )
        metrics = self._metrics if self._workers is None else await self._workers.metrics()
        return web.Response(body=metrics.render(read).encode(), headers={"Content-Type": CONTENT_TYPE})


def _figures(requests: Gatekeeper | Requests) -> dict[str, Any]:
    return {"in_flight": requests.in_flight, "waiting": requests.waiting, "busy_s": requests.busy_s}


def event_json(event: Event) -> dict[str, Any]:
    """An event for people and dashboards: every field, but counts instead of token ids."""
    if isinstance(event, CallFinished):
        return {"at": event.at, "call": event.call.turn.summary(event.episode)}
    return asdict(event)


async def _unknown(http: web.Request) -> web.StreamResponse:
    """404 for a path under ``/ajet`` that is no route; 405 for a route asked with another method."""
    resource = http.path.removeprefix(PREFIX)
    allowed = [route.method for route in ROUTES if _matches(route.path, resource)]
    if allowed and http.path.startswith(PREFIX):
        raise web.HTTPMethodNotAllowed(http.method, sorted(set(allowed)))
    raise NotFound(f"no control route {http.method} {http.path}", code="unknown_route")


def _matches(template: str, path: str) -> bool:
    want, have = template.split("/"), path.split("/")
    return len(want) == len(have) and all(w in ("{id}", h) for w, h in zip(want, have, strict=True))


def _check_wire(http: web.Request) -> None:
    """Refuse a trainer that reads none of the wire versions we write."""
    asked = http.headers.get(routes.HEADER_WIRE)
    if asked is None:
        return
    if str(frame.VERSION) not in [item.strip() for item in asked.split(",")]:
        raise BadRequest(
            f"this proxy writes wire version {frame.VERSION}; the trainer reads {asked[:80]!r}: update one of them",
            code="wire_version", param=routes.HEADER_WIRE,
        )


def _response(answer: api.Answer) -> web.Response:
    return web.json_response(answer.body(), status=answer.status)
