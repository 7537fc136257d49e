"""The routes at which a trainer waits: for a batch that is ready, for engines that are quiet while their weights
change."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial

from aiohttp import web

from ajet_proxy.core.control.asked import Asked
from ajet_proxy.core.ledger import views
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.engines.pause import EngineControl
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.http.audit import SUBJECT
from ajet_proxy.io.ledger_port.gatekeeper import RETRY_AFTER_S, Gatekeeper
from ajet_proxy.io.workers.processes import Workers
from ajet_proxy.own_address import Address, leads_here
from ajet_sdk import frame
from ajet_sdk.errors import BadRequest, NotReady
from ajet_sdk.headers import HEADER_WIRE

PAUSE = 4.0
"""A lease that found nothing looks again no sooner than after so many times as long: others need the processor too."""


async def lease(desk: Desk, http: web.Request, asked: Asked) -> web.Response:
    """A batch as one MessagePack frame, or 204 when nothing became ready in ``wait_s``.

    It looks again when another look may find more. The frame is made in a thread: leased episodes do not change, and
    millions of tokens take a while.
    """
    reads = http.headers.get(HEADER_WIRE)
    if reads is not None and str(frame.VERSION) not in map(str.strip, reads.split(",")):
        raise BadRequest(
            f"this proxy writes wire version {frame.VERSION}; the trainer reads {reads[:80]!r}: update one of them",
            code="wire_version", param=HEADER_WIRE,
        )
    store, clock, stopping = desk.store, desk.clock, desk.stopping
    deadline = clock.now() + asked.body.wait_s
    while True:
        seen, began = store.state.leasable(), clock.now()
        answer = await desk.decide(asked)
        took = clock.now() - began
        if answer.events:
            await store.commit(answer.events)
        if answer.status != 204:
            break
        if answer.events and not stopping.is_set():  # what was dropped may have stood before a group
            continue
        left = deadline - clock.now()
        if left <= 0 or stopping.is_set():
            return web.Response(status=204)
        again = store.commands.leases.next_end(asked.body, at=clock.now())
        await desk.until_stop(store.leasable(seen, min(left, again)))
        await asyncio.sleep(min(left, PAUSE * took))
    batch = http[SUBJECT] = str((await desk.shown(answer))["batch"])
    data = await asyncio.to_thread(lambda: frame.encode_batch(views.batch(store.state, batch)))
    return web.Response(body=data, content_type=frame.CONTENT_TYPE)


class Weights:
    """The handlers of what changes weights: requests are held, and engines emptied or frozen. `listening` holds the
    addresses at which the daemon listens; they are read at each request."""

    def __init__(
        self, desk: Desk, *, gate: Gatekeeper, engines: Engines, workers: Workers | None,
        listening: Collection[Address],
    ) -> None:
        self._desk = desk
        self._gate = gate
        self._engines = engines
        self._engine_control = EngineControl(key=desk.config.upstream_key)
        self._workers = workers
        self._listening = listening
        self._pauses = desk.config.gate_mode == "pause"

    async def gate_close(self, http: web.Request, asked: Asked) -> web.Response:
        """Hold new calls; then freeze the engines or wait for the calls in flight, as configured. An engine that serves
        another model too is not frozen, since calls of that one would wait. Nor is one that the named model does not
        have, such as a teacher's: its weights stay, and it may be unable to."""
        await self._desk.settle(asked)
        model, engines = asked.body.model or "", self._engines
        behind = partial(engines.guards, model)
        if self._pauses and not engines.shares(model):
            own = engines.of(model) if model else ()
            await self._engine_control.pause(own or engines.behind(model))
        elif not await self._gate.drained(asked.body.wait_s, behind):
            count = self._gate.inside(behind)
            raise NotReady(
                f"the gate is closing: {count} calls are still in flight; ask again", code="gate_closing",
                retry_after=RETRY_AFTER_S,
            )
        return web.json_response({"gate": "closed", "in_flight": self._gate.inside(behind)})

    async def gate_open(self, http: web.Request, asked: Asked) -> web.Response:
        """Let requests through, and wake the engines if they were frozen. Requests wait in a frozen engine until then.
        Where the trainer has woken its engine already, they need not wait for us. The new version is set before the
        first token that it samples. Opening an open gate wakes the engines again, but none that another model keeps
        frozen."""
        answer = await self._desk.settle(asked)
        if self._workers is not None:
            await self._workers.caught_up()
        faults: list[str] = []
        if self._pauses:
            engines, own = self._engines, asked.body.model or ""
            freezing = (gate for gate in self._desk.store.state.gates.shut() if not engines.shares(gate))
            frozen = {url for gate in freezing for url in engines.behind(gate)}
            urls = tuple(url for url in engines.behind(own) if url not in frozen)
            version = None if engines.shares(own) else asked.body.policy_version
            faults = await self._engine_control.resume(urls, version)
        return web.json_response(await self._desk.shown(answer) | ({"not_resumed": faults} if faults else {}))

    async def policy(self, http: web.Request, asked: Asked) -> web.Response:
        """Announce weights, and no engine at an address of ours."""
        for url in asked.body.upstreams or ():
            if await asyncio.to_thread(leads_here, url, tuple(self._listening), self._desk.config.public_url):
                raise BadRequest(
                    f"upstream {url[:200]!r} is the proxy's own address: give that of the engine", code="own_address",
                    param="upstreams",
                )
        return await self._desk.respond(await self._desk.settle(asked))
