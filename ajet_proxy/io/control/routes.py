"""The control routes on the wire: which handler serves each of them.

Each route of `ajet_sdk.routes.ROUTES` has one handler. That of most commits what the core decides, and answers
(`ajet_proxy.io.control.desk`). Those that wait for something, or show what only this process knows, are listed here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from aiohttp import web

from ajet_proxy.core.control import runs
from ajet_proxy.core.control.asked import Asked
from ajet_proxy.core.identity.keys import Keys
from ajet_proxy.io.control import training
from ajet_proxy.io.control.answers import Answers
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.control.judgements import Judgements
from ajet_proxy.io.control.openings import Openings
from ajet_proxy.io.control.runs import WaitingRuns
from ajet_proxy.io.control.training import Weights
from ajet_proxy.io.control.watching import PAGE, Watching
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.http import body as body_of
from ajet_proxy.io.http.audit import SUBJECT
from ajet_proxy.io.intercept.tunnels import Interception
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage.store import Store
from ajet_proxy.io.workers.processes import Workers
from ajet_proxy.own_address import Address
from ajet_proxy.settings import Config
from ajet_sdk.errors import NotFound
from ajet_sdk.routes import PREFIX, ROUTES, Route

Handler = Callable[[web.Request, Asked], Awaitable[web.StreamResponse]]


class Control:
    """The handlers of ``/ajet/v1/*`` and ``/metrics``."""

    def __init__(
        self, *, store: Store, keys: Keys, gate: Gatekeeper, engines: Engines, clock: Clock, metrics: Metrics,
        config: Config, interception: Interception | None, workers: Workers | None, budget: MemoryBudget,
        listening: Collection[Address],
    ) -> None:
        """`listening` holds the addresses at which the daemon listens; they are read at each request."""
        self._desk = desk = Desk(store, keys, clock, config, budget)
        self._answers = Answers(desk)
        self._openings = Openings(desk, engines)
        self._runs = WaitingRuns(desk)
        self._watching = Watching(
            desk, self._openings, gate=gate, engines=engines, metrics=metrics, workers=workers,
            interception=interception,
        )
        weights = Weights(desk, gate=gate, engines=engines, workers=workers, listening=listening)
        self._handlers: Mapping[str, Handler] = {
            "open_episode": self._openings.open_episode, "join": partial(self._named, "client"),
            "reward_answer": partial(self._named, "episode"), "feedback": partial(self._named, "episode"),
            "lease_judgements": Judgements(desk, engines).lease, "lease": partial(training.lease, desk),
            "gate_close": weights.gate_close, "gate_open": weights.gate_open, "policy": weights.policy,
            "put_run": partial(self._runs.want, runs.put_run), "change_run": partial(self._runs.want, runs.change_run),
            "forget_run": self._runs.forget_run, "supervise": self._runs.supervise, "status": self._watching.status,
            "events": self._watching.events, "ca": self._watching.ca,
            **dict.fromkeys(("get_episode", "list_episodes", "list_runs", "overview"), self._answers.look),
        }

    def stop(self) -> None:
        """End the waits of trainers, of event readers and of those who open episodes, so that the daemon can end."""
        self._desk.stopping.set()
        self._openings.stop()
        self._runs.stop()

    def add_routes(self, app: web.Application) -> None:
        """Register every control route, and refuse what else lies under ``/ajet``."""
        add = partial(app.router.add_route, expect_handler=body_of.unasked)
        for route in ROUTES:
            add(route.method, PREFIX + route.path, partial(self._serve, route))
        add("GET", "/metrics", self._watching.metrics)
        add("GET", PAGE, self._watching.page)
        add("GET", PAGE.rstrip("/"), self._watching.page_without_slash)
        add("*", "/ajet{tail:(/.*)?}", _unknown)
        app.on_cleanup.append(self._answers.close)

    async def _serve(self, route: Route, http: web.Request) -> web.StreamResponse:
        asked = await self._desk.take(http, route)
        return await self._handlers.get(route.name, self._answer)(http, asked)

    async def _answer(self, _http: web.Request, asked: Asked) -> web.Response:
        return await self._desk.respond(await self._desk.settle(asked))

    async def _named(self, name: str, http: web.Request, asked: Asked) -> web.Response:
        """Answers, and notes for the audit log whom the answer names."""
        shown = await self._desk.shown(await self._desk.settle(asked))
        http[SUBJECT] = shown[name]
        return web.json_response(shown)


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
