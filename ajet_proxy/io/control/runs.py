"""Where the routes of runs wait: a configuration for its supervisor's verdict, a supervisor for news.

A supervisor's request stays open until something else is wanted, or something needs a check, for a second or so. So
a verdict comes at once, though the supervisor is the one who asks.

Invariant: no answer leaves before its events are on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ajet_proxy.core.control.api import Answer, Request
from ajet_proxy.core.control.runs import Runs, Wish
from ajet_proxy.core.ledger.supervisors import Verdict
from ajet_proxy.io.ledger_port.gatekeeper import RETRY_AFTER_S
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import NotReady
from ajet_sdk.routes import Supervise, parse

VERDICT_S = 10.0
"""How long a configuration waits for its supervisor."""
MAX_POLL_S = 5.0
"""How long a supervisor's request is held: less than it may be silent."""


class RunsPort:
    """`Runs` over the store of a daemon."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._runs = Runs(store.commands)
        self._news = asyncio.Event()
        self._stopped = False

    def stop(self) -> None:
        """End all waits."""
        self._stopped = True
        self._ring()

    async def answer(self, request: Request) -> Answer:
        """The answer to one of `RUN_ROUTES`; its events are on disk."""
        if request.route in ("put_run", "change_run"):
            answer = await self._want(request)
        else:
            answer = self._runs.handle(request, self._clock.now())
        if answer.events:
            await self._store.commit(answer.events)
            self._ring()
        if request.route == "supervise":
            await self._supervise(request, answer)
        return answer

    async def _want(self, request: Request) -> Answer:
        wish = self._runs.asked(request, self._clock.now())
        verdict = await self._verdict(wish) if wish.unchecked else None
        return self._runs.decide(wish, verdict, self._clock.now())

    async def _verdict(self, wish: Wish) -> Verdict:
        supervisors, check = self._runs.supervisors, self._clock.new_id("check")
        supervisors.checks[check] = (wish.supervisor, {"run": wish.run, "config": dict(wish.config)})
        self._ring()
        try:
            if await self._until(lambda: check in supervisors.verdicts, VERDICT_S):
                return supervisors.verdicts.pop(check)
        finally:
            supervisors.checks.pop(check, None)
            supervisors.verdicts.pop(check, None)
        said = f"supervisor {wish.supervisor} has not said within {VERDICT_S:g} s whether this can run: ask again"
        raise NotReady(said, code="no_verdict", retry_after=RETRY_AFTER_S)

    async def _supervise(self, request: Request, answer: Answer) -> None:
        said = parse(Supervise, request.body)
        self._ring()  # perhaps with a verdict

        def news() -> bool:
            told: dict[str, Any] = answer.body() or {}
            return bool(told["checks"]) or told["known"] != said.known

        await self._until(news, min(max(said.wait_s, 0.0), MAX_POLL_S))

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Waits until `reached`, for at most `limit_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not reached() and not self._stopped:
                    await self._news.wait()
        return reached()
