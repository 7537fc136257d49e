"""Episodes that are opened once their lanes have room for them (`ajet_proxy.io.control.pace`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from aiohttp import web

from ajet_proxy.core.control.asked import Asked
from ajet_proxy.core.ledger.commands import paced
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.control.pace import Pace
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.http.audit import SUBJECT
from ajet_sdk.errors import NotReady

HOLD_S = 15.0
"""An episode that a lane has no room for is held so long, and then refused, before its client takes us for dead."""


class Openings:
    """The handler of ``POST episodes``."""

    def __init__(self, desk: Desk, engines: Engines) -> None:
        self._desk, self._state, self._engines = desk, desk.store.state, engines
        self._pace = Pace(self._state.mixes.room, self._state.mixes.lacking)
        self._watch = cache(lambda: desk.store.listen(lambda _events: self._pace.changed()))
        """Once lanes may be full, each event may make room."""

    def stop(self) -> None:
        """Hold nobody from now on."""
        self._pace.stop()

    async def open_episode(self, http: web.Request, asked: Asked) -> web.Response:
        """Open it when its lane has room. What is wrong with it is said before, and who has it already has it
        again. The archive is asked for its id before it is held, so that who is let in takes the room at once."""
        episode = asked.name("ep")
        asked = replace(asked, new_id=lambda _kind: episode)
        await self._check_engines(asked)
        where = paced(self._state, (await self._desk.decide(asked)).events) if self._state.mixes.paced() else None
        if where is not None:
            self._watch()
            group_key, models = where
            wanted = HOLD_S if asked.body.hold_s is None else asked.body.hold_s
            hold_s = min(wanted, HOLD_S, self._desk.config.gate_hold_s)
            name = None if asked.body.id is None else (asked.claims.tenant, asked.body.id)
            if not await self._pace.enter(group_key, hold_s, models, name):
                said = f"lane {group_key.lane!r} has as many groups open or ready as may be ahead of what is leased"
                raise NotReady(said, code="lane_full", retry_after=1.0)
        try:
            answer = await self._desk.settle(asked, unknown=() if where is None else (episode,))
        finally:
            self._pace.changed()  # the room is somebody else's, if it was not taken
        shown = await self._desk.shown(answer)
        http[SUBJECT] = shown.get("episode", "")
        return web.json_response(shown)

    def held(self) -> Iterator[str]:
        """An alert for each lane in which agents wait for room that nobody makes."""
        for lane, models in self._pace.full():
            mixes = [one.mix for one in self._state.mixes.several(models)]
            if all(mix.shares and not mix.shares.get(lane) for mix in mixes):
                yield f"agents wait to play lane {lane!r}, which has no share in the mix (ajet mix)"

    async def _check_engines(self, asked: Asked) -> None:
        """`NotReady` if the episode, a member or a teacher has a model that no engine serves: it is misspelt, or its
        trainer has yet to announce it. The calls of an episode wait for the first trainer of all."""
        members, teachers = asked.body.members or {}, asked.body.teachers or {}
        agents = {model: repr(name) for name, model in {**members, **teachers}.items()}
        if asked.body.model and self._engines.names():
            agents[asked.body.model] = "the episode"
        if (model := self._engines.lacks(agents)) is not None:
            await self._desk.decide(asked)  # what is wrong with the request is said first
            known = ", ".join(map(repr, self._engines.names())) or "none yet"
            said = f"no engine serves {model!r}, the model of {agents[model]}; there are engines for {known}"
            raise NotReady(said, code="no_engine", retry_after=1.0)
