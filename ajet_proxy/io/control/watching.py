"""The routes that are looked at: the status, the metrics, the stream of events, the CA, and the owner's page."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from msgspec.structs import asdict
from yarl import URL

from ajet_proxy.core.control.asked import Asked
from ajet_proxy.core.identity.keys import check_scope
from ajet_proxy.core.ledger.events import CallFinished, Event
from ajet_proxy.io.control import gauges
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.control.openings import Openings
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.http.audit import BEGUN
from ajet_proxy.io.intercept.tunnels import Interception
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper, Requests
from ajet_proxy.io.runtime.metrics import CONTENT_TYPE, Metrics
from ajet_proxy.io.workers.processes import Workers
from ajet_sdk.errors import NotFound, Unauthorized
from ajet_sdk.page import live_page

PAGE = "/ajet/"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class Watching:
    """Their handlers."""

    def __init__(
        self, desk: Desk, openings: Openings, *, gate: Gatekeeper, engines: Engines, metrics: Metrics,
        workers: Workers | None, interception: Interception | None,
    ) -> None:
        self._desk, self._store = desk, desk.store
        self._openings = openings
        self._gate = gate
        self._engines = engines
        self._metrics = metrics
        self._workers = workers
        self._interception = interception
        page, policy = live_page()
        self._page = page
        self._page_headers = {
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    async def status(self, http: web.Request, asked: Asked) -> web.Response:
        """The ledger's status, with what only this process knows: its engines and who waits. ``any_model`` has the
        engines for each model that has none of its own. Alerts may name another tenant's users, so an agent's key and
        a judge's see none."""
        known = await self._desk.shown(await self._desk.decide(asked))
        models = {name: self._model(name) for name in self._engines.names()}
        others = {"any_model": models.pop("")} if "" in models else {}
        now: dict[str, Any] = {"requests": _figures(self._gate)}
        limits = self._store.limits
        now["journal"] = {"healthy": self._store.healthy, "refused": {} if limits is None else limits.refused()}
        sees = asked.claims.scope in ("trainer", "admin")
        now["alerts"] = self._alerts() if sees else []
        if self._interception is not None:
            now["intercept"] = self._interception.to_json(URL(asked.base).host)
        return web.json_response(known | {"models": models} | others | now)

    def _alerts(self) -> list[str]:
        return [*self._store.alerts().values(), *self._openings.held()]

    def _model(self, name: str) -> dict[str, Any]:
        """Which weights serve a model, its gate, and the requests that count as its own."""
        state, gate = self._store.state, "open"
        if not self._gate.is_open(name):
            several = len(state.weights.served) > 1
            inside = self._gate.of(name).in_flight if several else state.gates.running
            gate = "closing" if inside else "closed"
        urls = list(self._engines.of(name))
        version = state.weights.policy_version(name)
        return {"policy_version": version, "gate": gate, "upstreams": urls} | _figures(self._gate.of(name))

    async def ca(self, http: web.Request, asked: Asked) -> web.Response:
        """The certificate that a program must trust to be intercepted."""
        if self._interception is None:
            raise NotFound("this proxy intercepts nothing: start it with --intercept", code="no_interception")
        return web.Response(body=self._interception.certificate, content_type="application/x-pem-file")

    async def events(self, http: web.Request, asked: Asked) -> web.StreamResponse:
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

        await self._desk.until_stop(stream())
        return response

    async def metrics(self, http: web.Request) -> web.Response:
        """Prometheus text. A peer on this machine needs no key, if there is no trusted front; others an admin's."""
        if http.remote not in LOOPBACK or self._desk.config.trusted_front:
            check_scope(self._desk.claims(http), "admin")
        pids = {} if self._workers is None else self._workers.pids()
        read = gauges.read(self._store, self._gate, self._engines, pids, len(self._alerts()))
        metrics = self._metrics if self._workers is None else await self._workers.metrics()
        return web.Response(body=metrics.render(read).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def page(self, http: web.Request) -> web.Response:
        """``/ajet/``: the owner's page, one document that asks the control routes for all it shows.

        A browser cannot send a key with an address, and a key in an address would end in histories and logs. So a
        caller without a key is answered 401 with the page itself, which holds no data. The page asks for a key, keeps
        it in its own tab and sends it as a header. A program that takes no HTML gets the usual error.

        Invariant: the page is the same for everyone. Its headers forbid other sites to frame it, and it may ask no
        other site.
        """
        status = 200
        try:
            check_scope(self._desk.claims(http), "admin")
        except Unauthorized:
            if "text/html" not in http.headers.get("Accept", ""):
                raise
            status = 401
        return web.Response(text=self._page, status=status, content_type="text/html", headers=self._page_headers)

    async def page_without_slash(self, _http: web.Request) -> web.Response:
        return web.Response(status=308, headers={"Location": PAGE})


def _figures(requests: Requests) -> dict[str, Any]:
    return {"in_flight": requests.in_flight, "waiting": requests.waiting, "busy_s": requests.busy_s}


def event_json(event: Event) -> dict[str, Any]:
    """An event for people and dashboards: every field, but counts instead of token ids."""
    if isinstance(event, CallFinished):
        return {"at": event.at, "call": event.call.turn.summary(event.episode)}
    return asdict(event)
