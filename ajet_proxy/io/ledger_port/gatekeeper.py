"""The gate as requests meet it: hold while weights change, count who is inside.

The ledger says whether the gate is open (it is journaled and survives a restart); this module only makes requests wait
for it. Requests are held, not refused: an agent never learns that the weights changed. A request that waited `hold_s`
gives up with a 503, so that a dead trainer cannot hold agents forever.

Invariant: `in_flight` is the number of ``enter`` blocks that are running, and none starts while the gate is not open.
`busy_s` never falls, and grows exactly while `in_flight` is not 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter

from ajet_sdk.errors import NotReady

RETRY_AFTER_S = 5.0


class Gatekeeper:
    """Holds requests while `is_open` is False. Call `changed` when what `is_open` reads has changed."""

    def __init__(
        self, *, is_open: Callable[[], bool], hold_s: float, waited: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`waited` is told, for each request that came in, how many seconds it was held."""
        self._is_open = is_open
        self._hold_s = hold_s
        self._waited = waited
        self._change = asyncio.Event()
        self._stopping = False
        self.in_flight = 0
        self.waiting = 0
        self._busy_before = self._busy_since = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which anybody was inside."""
        return self._busy_before + (perf_counter() - self._busy_since if self.in_flight else 0.0)

    def changed(self) -> None:
        """Wake everyone who waits, to look again."""
        self._change.set()
        self._change = asyncio.Event()

    def stop(self) -> None:
        """Hold no request from now on: those that wait, and those that would have to, get a 503 at once."""
        self._stopping = True
        self.changed()

    @asynccontextmanager
    async def enter(self, ready: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Enter once the gate is open and `ready` (e.g. an engine is known) holds; `NotReady` after `hold_s`."""

        def passable() -> bool:
            return self._is_open() and ready()

        began = perf_counter()
        if not passable():
            await self._hold(passable)
        now = perf_counter()
        self._waited(now - began)
        if self.in_flight == 0:
            self._busy_since = now
        self.in_flight += 1
        try:
            yield
        finally:
            busy_s = self.busy_s
            self.in_flight -= 1
            if self.in_flight == 0:
                self._busy_before = busy_s
                self.changed()

    async def drained(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until nobody is inside. Returns whether that came true."""
        return await self._until(lambda: self.in_flight == 0, wait_s)

    async def _hold(self, passable: Callable[[], bool]) -> None:
        self.waiting += 1
        try:
            await self._until(lambda: self._stopping or passable(), self._hold_s)
        finally:
            self.waiting -= 1
        if passable():
            return
        if self._stopping:
            raise NotReady("the proxy is stopping", code="stopping", retry_after=RETRY_AFTER_S)
        what = "no engine has been announced yet" if self._is_open() else "the gate is closed while weights change"
        raise NotReady(what, code="gate_closed", retry_after=RETRY_AFTER_S)

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while not condition():
            change = self._change
            try:
                async with asyncio.timeout_at(deadline):
                    await change.wait()
            except TimeoutError:
                return condition()
        return True
