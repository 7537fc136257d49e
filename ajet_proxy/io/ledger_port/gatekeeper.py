"""The gates as requests meet them: hold while weights change, count who is inside.

The ledger says which gates are open (it is journaled and survives a restart); this module only makes requests wait for
them. Requests are held, not refused: an agent never learns that the weights changed. A request that waited `hold_s`
gives up with a 503, so that a dead trainer cannot hold agents forever. Each model has a gate, and a request counts as
one model's (`ajet_proxy.io.engines.upstream.Engines.home`).

Invariant: `in_flight` is the number of requests inside (`enter`), and none comes in while its gate is not open.
`busy_s` never falls, and grows exactly while `in_flight` is not 0. The same holds for each model.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import perf_counter

from ajet_sdk.errors import NotReady

RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class Requests:
    """The requests of one model, or of all: how many are inside, and how many wait."""

    in_flight: int = 0
    waiting: int = 0
    _busy_before: float = 0.0
    _busy_since: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which anybody was inside."""
        return self._busy_before + (perf_counter() - self._busy_since if self.in_flight else 0.0)

    def come(self) -> None:
        if self.in_flight == 0:
            self._busy_since = perf_counter()
        self.in_flight += 1

    def go(self) -> None:
        if self.in_flight == 1:
            self._busy_before = self.busy_s
        self.in_flight -= 1


class Bell:
    """Wakes all who wait for something, to look again whether it is so."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake them."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `reached`, for at most `limit_s` seconds. Returns whether it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not reached():
                    await self._rung.wait()
        return reached()


class Gatekeeper(Requests):
    """Holds the requests of a model while `is_open` is False for it, and counts those of all. Call `changed` when what
    `is_open` reads has changed."""

    def __init__(
        self, *, is_open: Callable[[str], bool], hold_s: float, waited: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`waited` is told, for each request that came in, how many seconds it was held."""
        super().__init__()
        self.is_open = is_open
        self._hold_s = hold_s
        self._waited = waited
        self._bell, self._emptied = Bell(), Bell()
        self._stopping = False
        self._of: defaultdict[str, Requests] = defaultdict(Requests)
        self.held: Counter[str] = Counter()
        """The episodes of those that wait, each with how many."""

    def of(self, model: str) -> Requests:
        """The requests that count as of `model`; of "", those of no model."""
        return self._of.get(model, Requests())

    def changed(self) -> None:
        """Have those look again who wait for a gate, or for nobody to be inside."""
        self._bell.ring()
        self._emptied.ring()

    def stop(self) -> None:
        """Hold no request from now on: those that wait, and those that would have to, get a 503 at once."""
        self._stopping = True
        self.changed()

    @asynccontextmanager
    async def enter(
        self, model: Callable[[], str] = str, ready: Callable[[], bool] = lambda: True, episode: str = ""
    ) -> AsyncIterator[None]:
        """A block that begins once the gate is open and `ready` (e.g. an engine is known) holds; `NotReady` after
        `hold_s`. The request is inside until its end, for which nobody waits. `model` tells as whose it counts, which
        may change while it waits. `episode` is whose request it is."""

        def passable() -> bool:
            return self.is_open(model()) and ready()

        began = perf_counter()
        if not passable():
            await self._hold(passable, model, episode)
        self._waited(perf_counter() - began)
        own = self._of[model()]
        self.come()
        own.come()
        try:
            yield
        finally:
            self.go()
            own.go()
            if own.in_flight == 0:
                self._emptied.ring()  # those who are held need not look

    def inside(self, among: Callable[[str], bool] = lambda model: True) -> int:
        """The number of requests inside, of the models `among` which to look."""
        return sum(requests.in_flight for model, requests in self._of.items() if among(model))

    async def drained(self, wait_s: float, among: Callable[[str], bool] = lambda model: True) -> bool:
        """Wait up to `wait_s` seconds until nobody is inside of the models `among` which to look. Returns whether that
        came true."""
        return await self._emptied.until(lambda: self.inside(among) == 0, wait_s)

    async def _hold(self, passable: Callable[[], bool], model: Callable[[], str], episode: str) -> None:
        held = (self, self._of[model()])
        self.held[episode] += 1
        for requests in held:
            requests.waiting += 1
        try:
            await self._bell.until(lambda: self._stopping or passable(), self._hold_s)
        finally:
            for requests in held:
                requests.waiting -= 1
            self.held[episode] -= 1
            if not self.held[episode]:
                del self.held[episode]
        if passable():
            return
        if self._stopping:
            raise NotReady("the proxy is stopping", code="stopping", retry_after=RETRY_AFTER_S)
        shut = not self.is_open(model())
        what = "the gate is closed while weights change" if shut else "no engine has been announced yet"
        raise NotReady(what, code="gate_closed", retry_after=RETRY_AFTER_S)
