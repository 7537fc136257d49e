"""A control request from its arrival to its answer: the caller's claims, the body, the decision, the disk.

What a route means is decided by `ajet_proxy.core.control.api`, a function of the request and the ledger. Here the
caller's claims are found and the body is decoded, once. The events that the core returned are committed before it is
answered (contract §13).

Invariant: no answer leaves before its events are on disk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Coroutine
from dataclasses import replace
from functools import cache
from typing import Any

from aiohttp import web

from ajet_proxy.core.control import api
from ajet_proxy.core.control.asked import Answer, Asked, read
from ajet_proxy.core.identity.keys import Claims, Keys, check_scope, key_in
from ajet_proxy.core.ledger.parts import Part
from ajet_proxy.core.ledger.supervisors import Supervisors
from ajet_proxy.io.http import body as body_of
from ajet_proxy.io.http import tls
from ajet_proxy.io.http.aiohttp_internals import PATIENCE_S
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.storage.store import Store
from ajet_proxy.settings import Config
from ajet_sdk.errors import BadRequest
from ajet_sdk.headers import HEADER_TRAINER
from ajet_sdk.routes import Route

KEY_TTL_S = 7 * 86400.0
"""An episode's key lives this long, or as long as the episode may be open."""


class Desk:
    """Takes control requests, and has them decided over `store`."""

    def __init__(self, store: Store, keys: Keys, clock: Clock, config: Config, budget: MemoryBudget) -> None:
        self.store = store
        self.clock = clock
        self.config = config
        self.stopping = asyncio.Event()
        self._keys = keys
        self._budget = budget
        self._supervisors = Supervisors()

    async def take(self, http: web.Request, route: Route) -> Asked:
        """The request `http` of a caller who may use `route`."""
        claims = self.claims(http)
        check_scope(claims, route.scope)
        if self.config.tls_client_ca is not None and route.scope == "trainer":
            tls.demand(http)
        body = None if route.body is None else await self._decoded(http, route)
        return Asked(
            route, claims, self.store.commands, self.store.presence, self._supervisors, self.clock.now(),
            self.clock.new_id, self._issue, id=http.match_info.get("id", ""), query=dict(http.query),
            body=read(route, body, claims, self.store.state.weights),
            trainer=http.headers.get(HEADER_TRAINER, ""), base=self.base_url(http),
        )

    async def decide(self, asked: Asked, unknown: Collection[str] = ()) -> Answer:
        """The core's answer to `asked` as things are now. What was heard by it is noted, and nothing else has changed.
        New ids stay the same while the archive is read for it. Episodes that are `unknown` are in no archive."""
        new_id, now = cache(asked.new_id), self.clock.now
        answer = await self.store.decide(lambda: api.decide(replace(asked, at=now(), new_id=new_id)), unknown)
        answer.note()
        return answer

    async def settle(self, asked: Asked, unknown: Collection[str] = ()) -> Answer:
        """The core's answer to `asked`. Unless it is a ``GET``, its events and all earlier ones are on disk first.
        Nobody else gets a turn before they are applied, if `unknown` has all that would be read for it."""
        answer = await self.decide(asked, unknown)
        while isinstance(answer.events, Part):
            asked = replace(asked, before=(*asked.before, *answer.events))
            await self.store.commit(answer.events)
            answer = await self.decide(asked, unknown)
        if asked.route.method != "GET":
            await self.store.commit(answer.events)
        return answer

    async def shown(self, answer: Answer) -> dict[str, Any]:
        """The body of `answer`, as things are now."""
        return await self.store.decide(answer.body) or {}

    async def respond(self, answer: Answer) -> web.Response:
        return web.json_response(await self.shown(answer), status=answer.status)

    def claims(self, http: web.Request) -> Claims:
        """The claims of the caller's key, or `Unauthorized`."""
        return self._keys.authenticate(key_in(http.headers), self.clock.now())

    def base_url(self, http: web.Request) -> str:
        """The base URL under which this caller reaches the proxy, without a trailing slash."""
        if self.config.public_url:
            return self.config.public_url.rstrip("/")
        scheme, host = http.scheme, http.host
        if self.config.trusted_front:
            scheme = http.headers.get("X-Forwarded-Proto", scheme)
            host = http.headers.get("X-Forwarded-Host", host)
        return f"{scheme}://{host}"

    async def until_stop(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work` to its end, or until the daemon stops."""
        loop = asyncio.get_running_loop()
        tasks = (loop.create_task(work), loop.create_task(self.stopping.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decoded(self, http: web.Request, route: Route) -> Any:
        """The JSON body; None if there is none. Raises `BadRequest` for what is not JSON."""
        most = min(self.config.max_body, route.max_body)
        raw = await body_of.read(http, max_body=most, limit_s=PATIENCE_S, budget=self._budget)
        if not raw.strip():
            return None
        try:
            return json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error

    def _issue(self, tenant: str, episode: str) -> str:
        """A key for one episode. It expires by our clock; a command revokes it by the clock of this machine."""
        expires = self.clock.now() + max(KEY_TTL_S, self.config.wall_timeout)
        return self._keys.issue(Claims("agent", tenant, episode, expires, self.clock.wall()))
