"""Where the routes of runs wait: a configuration for its supervisor's verdict, a supervisor for news.

A supervisor's request stays open until something else is wanted, or something needs a check, for a second or so. So
a verdict comes at once, though the supervisor is the one who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from ajet_proxy.core.control.asked import Answer, Asked
from ajet_proxy.core.control.runs import Wish, granted
from ajet_proxy.core.ledger.supervisors import Verdict
from ajet_proxy.io.control.desk import Desk
from ajet_proxy.io.ledger_port.gatekeeper import RETRY_AFTER_S, Bell
from ajet_sdk.errors import NotReady

VERDICT_S = 10.0
"""The longest that a configuration waits for its supervisor."""
MAX_POLL_S = 5.0
"""The longest that a supervisor's request is held: less than it may be silent."""


class WaitingRuns:
    """The handlers of runs that wait for somebody, or whom somebody waits for."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._news, self._stops = Bell(), desk.stopping.is_set

    def stop(self) -> None:
        """End all waits, once the desk is stopping."""
        self._news.ring()

    async def want(self, wished: Callable[[Asked], Wish], http: web.Request, asked: Asked) -> web.Response:
        """``PUT`` and ``PATCH``: stored once the supervisor has looked at it."""
        wish = wished(asked)
        verdict = await self._verdict(asked, wish) if wish.unchecked else None
        return await self._settled(granted(replace(asked, at=self._desk.clock.now()), wish, verdict))

    async def forget_run(self, http: web.Request, asked: Asked) -> web.Response:
        """``DELETE``: its supervisor hears of it at once."""
        return await self._settled(await self._desk.decide(asked))

    async def supervise(self, http: web.Request, asked: Asked) -> web.Response:
        """``POST supervisor``: it is answered when there are news, or after a while."""
        answer = await self._desk.decide(asked)
        self._news.ring()  # perhaps with a verdict

        def news() -> bool:
            told: dict[str, Any] = answer.body() or {}
            return bool(told["checks"]) or told["known"] != asked.body.known or self._stops()

        await self._news.until(news, min(asked.body.wait_s, MAX_POLL_S))
        return await self._desk.respond(answer)

    async def _settled(self, answer: Answer) -> web.Response:
        await self._desk.store.commit(answer.events)
        self._news.ring()
        return await self._desk.respond(answer)

    async def _verdict(self, asked: Asked, wish: Wish) -> Verdict:
        supervisors, check = asked.supervisors, asked.new_id("check")
        supervisors.checks[check] = (wish.supervisor, {"run": wish.run, "config": dict(wish.config)})
        self._news.ring()
        try:
            await self._news.until(lambda: check in supervisors.verdicts or self._stops(), VERDICT_S)
            if check in supervisors.verdicts:
                return supervisors.verdicts.pop(check)
        finally:
            supervisors.checks.pop(check, None)
            supervisors.verdicts.pop(check, None)
        said = f"supervisor {wish.supervisor} has not said within {VERDICT_S:g} s whether this can run: ask again"
        raise NotReady(said, code="no_verdict", retry_after=RETRY_AFTER_S)
