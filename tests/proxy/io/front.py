"""The front between a client and stub engines: the real ledger, and a store that keeps everything in memory.

With `Front.remote` the front asks the ledger as a worker does, over a socket. `conftest` runs its tests both
ways.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest
from aiohttp import web

from ajet_proxy.core.identity.keys import Claims, Keys
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.events import CallFinished, CallLost, CallStarted, Event, Events, RequestLost
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.io.capture.front import HttpFront
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.engines.watch import EngineWatch
from ajet_proxy.io.http.aiohttp_internals import Runner
from ajet_proxy.io.http.errors import error_middleware, http_logger
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.ledger_port.local import LocalPort
from ajet_proxy.io.ledger_port.remote import VALUES, Facts, RemotePort
from ajet_proxy.io.ledger_port.remote_server import PortServer
from ajet_proxy.io.ledger_port.worker_connection import WorkerConnection
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.settings import Config
from ajet_sdk.errors import NotReady
from ajet_sdk.routes import GateClose, GateOpen, OpenEpisode, Policy, Reward
from ajet_sdk.sample import Call
from tests.kit.wire import Answer, send

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
SECRET = "an-admin-secret-of-length"


class MemoryStore:
    """Keeps the promises of `Store`, without a disk: `durable` are the events that a disk would hold by now. `slow`
    delays them, `full` refuses them."""

    def __init__(self) -> None:
        self.state = State(LedgerSettings(idle_timeout=1e9, wall_timeout=1e9))
        self.commands = Commands(self.state, Presence())
        self.durable: list[Event] = []
        self.slow = asyncio.Event()
        self.slow.set()
        self.full = False
        self.quotas: Any = None
        self.trouble: dict[str, str] = {}
        self.tell: Callable[[], None] = lambda: None
        self._listeners: list[Callable[[Events], None]] = []

    def listen(self, listener: Callable[[Events], None]) -> None:
        self._listeners.append(listener)

    async def decide(self, command: Callable[[], Any], unknown: Collection[str] = ()) -> Any:
        return command()

    def check(self, events: Events) -> None:
        if self.full and not all(isinstance(event, RequestLost) for event in events):
            raise NotReady("the disk is full", code="journal", retry_after=5.0)

    def post(self, events: Events) -> None:
        self.check(events)
        for event in events:
            self.state.apply(event)
        self.durable += events
        for listener in self._listeners:
            listener(events)
        self.tell()

    async def commit(self, events: Events) -> None:
        self.post(events)
        await self.slow.wait()


class Listening:
    """The words that a worker hears, as far as its ledger_port is concerned."""

    def __init__(self, connection: WorkerConnection, facts: Facts) -> None:
        self.ledger_port = RemotePort(connection, facts)

    def ask(self, what: str, values: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        raise AssertionError(f"nobody asks a front for {what}")

    def notified(self, what: str, values: Sequence[Any]) -> None:
        if what == "discarded":
            self.ledger_port.discarded(*values)
        else:
            (self.ledger_port.serving,) = values

    def lost(self) -> None:
        """The front is closed."""


class Front:
    """``async with Front(stub.url) as front``: a listening front before the engines at `upstreams`. A client may keep
    it waiting for `patience_s`; `settings` are those of `Config`."""

    remote: ClassVar[bool] = False

    def __init__(
        self, *upstreams: str, admin_secret: str | None = None, hold_s: float = 300.0, patience_s: float = 300.0,
        **settings: Any,
    ) -> None:
        self.patience_s = patience_s
        config = Config(**settings)
        self.store = MemoryStore()
        self.clock = Clock()
        self.metrics = Metrics()
        self.budget = MemoryBudget(self.metrics)
        self.keys = Keys(b"k" * 32, admin_secret=admin_secret)
        self.gate = Gatekeeper(is_open=self._passes, hold_s=hold_s)
        self.fixed: dict[str, tuple[str, ...]] = {"": upstreams} if upstreams else {}
        state = self.store.state
        self.engines = engines = Engines(self.fixed, state.weights.upstreams, state.weights.models)
        self.ledger_port = LocalPort(
            store=self.store, gate=self.gate, engines=engines, clock=self.clock, metrics=self.metrics,  # type: ignore[arg-type]
            watch=EngineWatch(engines, {}, shut=tuple, data_dir=Path()), pauses=config.gate_mode == "pause",
        )  # fmt: skip
        self._make = partial(
            HttpFront, config, "ajet_proxy", keys=self.keys, clock=self.clock, metrics=self.metrics,
            budget=self.budget,
        )
        self._hung_up = asyncio.Event()
        self.front = self._make(ledger_port=self.ledger_port, engines=engines)
        self.url = ""

    def _passes(self, home: str) -> bool:
        return self.engines.passes(self.store.state.gates.shut, home)

    async def __aenter__(self) -> Front:
        app = web.Application(middlewares=[error_middleware])
        if self.remote:
            self.front = await self._behind_a_socket()
        self.front.add_routes(app)
        self._runner = Runner(
            app, patience_s=self.patience_s, handler_cancellation=True, access_log=None, shutdown_timeout=0.1,
            logger=http_logger,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        if self.remote:
            self.worker.close()
            await self._hung_up.wait()
            await asyncio.sleep(0)  # in which this end lets go of its socket, too
            assert not self.gate.in_flight, "whoever enters leaves, at the latest with its process"

    @property
    def server(self) -> web.Server:
        """The server that answers its connections."""
        assert self._runner._server is not None
        return self._runner._server

    async def _behind_a_socket(self) -> HttpFront:
        """A front whose ledger_port is the real one at the other end of a socket."""
        loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
        facts = self.facts()
        _, behind = await loop.create_connection(
            lambda: WorkerConnection(VALUES, lambda made: self.port_server(made, self._hung_up.set)), sock=ours
        )
        _, self.worker = await loop.create_connection(
            lambda: WorkerConnection(VALUES, lambda made: Listening(made, facts)), sock=theirs
        )
        assert isinstance(self.worker.peer, Listening)
        ledger_port = self.worker.peer.ledger_port
        self.store.tell = lambda: behind.notify("facts", self.facts())
        return self._make(
            ledger_port=ledger_port,
            engines=Engines(
                self.fixed, lambda model: ledger_port.serving.upstreams(model), lambda: ledger_port.serving.models()
            ),
        )

    def port_server(self, connection: WorkerConnection, gone: Callable[[], None] = lambda: None) -> PortServer:
        """Who answers a worker at the other end of `connection`."""
        return PortServer(self.ledger_port, notify=connection.notify, more={}, gone=gone)

    def facts(self) -> Facts:
        state = self.store.state
        known = state.weights
        serving = known.default_version, known.policy_updates, known.merge_policy
        return Facts(dict(known.served), dict(known.candidates), *serving, self.keys.ring, "ajet_proxy")

    def open(self, episode: str, *, tenant: str = "", **body: Any) -> str:
        """An episode, opened by hand; its key."""
        self.do(self.store.commands.open_episode, OpenEpisode(**body), episode=episode, tenant=tenant)
        return self.keys.issue(Claims("agent", tenant, episode))

    def do(self, command: Callable[..., Events], *given: Any, **more: Any) -> None:
        """Have a command of the ledger happen."""
        self.store.post(command(*given, at=self.clock.now(), **more))

    def announce(self, model: str, version: int, *upstreams: str) -> None:
        self.do(self.store.commands.trainers.announce, Policy(model, version, upstreams))

    def close_gate(self, model: str | None = None) -> None:
        self.do(self.store.commands.trainers.gate_close, GateClose(model=model))

    def open_gate(self, policy_version: int, model: str | None = None) -> None:
        self.do(self.store.commands.trainers.gate_open, GateOpen(policy_version, model))

    def reward(self, episode: str) -> None:
        self.do(self.store.commands.reward, episode, Reward(1.0), reward_id=f"rew-{self.clock.now()}")

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.store.durable if isinstance(event, kind)]

    @property
    def calls(self) -> list[Call]:
        """The calls that are whole, in the order in which they ended."""
        return [event.call.turn.to_call(event.call.text, event.episode) for event in self.of(CallFinished)]

    @property
    def lost(self) -> list[str]:
        """Why the others are lost."""
        return [event.reason for event in self.of(CallLost)]

    @property
    def running(self) -> int:
        """Calls that began and did not end."""
        begun = {call for event in self.of(CallStarted) for call in event.calls}
        ended = {event.call.turn.call for event in self.of(CallFinished)} | {event.call for event in self.of(CallLost)}
        return len(begun - ended)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def get(url: str, **headers: str) -> Answer:
    return await send(url, method="GET", headers=headers)


def error(answer: Answer, status: int) -> dict[str, Any]:
    """The error with which a request was refused."""
    found: dict[str, Any] = answer.json()["error"]
    assert answer.status == status, found
    assert set(found) == {"message", "type", "code", "param"}
    return found


async def leave(asking: asyncio.Task[Any]) -> None:
    """Make the client of `asking` go away."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the loop's clock so many seconds on. What is due by then has begun."""
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + seconds)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def until(condition: Any, limit_s: float = 300.0) -> None:
    """Wait for `condition()` to hold."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (what is waited for lies in other programs' hands)
            await asyncio.sleep(0.005)
