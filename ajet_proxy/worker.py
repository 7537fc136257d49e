"""A worker process: takes agents' connections on the daemon's port and does all that needs no ledger.

Only the daemon starts ``python -m ajet_proxy.worker FD PROGRAM`` (`ajet_proxy.io.workers.processes`). FD is its
connection to the daemon, over which it is told its configuration; it reads no file of the data directory. It ignores
signals, which are for the daemon. It drains when it is told to. It ends at once when the daemon is gone, because
nothing that it could still answer would be on disk. One that hangs is killed then, or it would keep the port.

Invariant: both run the same code (PROGRAM is a digest of the daemon's). What crosses between them has no version, and
what is installed may be replaced while a daemon runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import web

from ajet_proxy.core.identity.keys import Keys
from ajet_proxy.io.capture import front
from ajet_proxy.io.capture.front import HttpFront, headers_as_sent
from ajet_proxy.io.control.forwarding import ControlForwarding
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.http import tls
from ajet_proxy.io.http.aiohttp_internals import Runner
from ajet_proxy.io.http.audit import audited
from ajet_proxy.io.ledger_port.remote import VALUES, Facts, RemotePort
from ajet_proxy.io.ledger_port.worker_connection import WorkerConnection
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.runtime.process import (
    WORKER,
    allow_many_connections,
    become_child,
    endings,
    log_to_stderr,
    look_for_garbage_less,
    program,
)
from ajet_proxy.own_address import Address
from ajet_proxy.settings import Config


class Worker:
    """The daemon's `Peer` in this process, and what serves agents."""

    def __init__(self, connection: WorkerConnection) -> None:
        self.over = asyncio.Event()
        self._connection = connection
        self._metrics = Metrics()
        self._budget = MemoryBudget(self._metrics)
        self._runner: Runner | None = None
        self._ledger_port: RemotePort
        self._keys: Keys
        self._work: set[asyncio.Task[None]] = set()
        self._notices: Mapping[str, Callable[..., None]] = {
            "start": lambda *values: self._do(self._start(*values)), "facts": self._take,
            "discarded": lambda entry: self._ledger_port.discarded(entry), "budget": self._budget.look,
            "drain": lambda: self._do(self._drain()),
        }

    async def ask(self, what: str, values: Sequence[Any]) -> Any:
        assert what == "figures"
        return self._metrics.figures()

    def notified(self, what: str, values: Sequence[Any]) -> None:
        self._notices[what](*values)

    def lost(self) -> None:
        if not self.over.is_set():
            os._exit(1)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin `work` at once, so that what "start" brings is there before the next notice."""
        task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _start(
        self, settings: Mapping[str, Any], facts: Facts, addresses: Sequence[Address], control: str
    ) -> None:
        try:
            await self._listen(Config(**settings), facts, addresses, control)
        except Exception as error:  # whatever it is, this process serves nobody, and its log line is the daemon's
            self._connection.notify("failed", str(error) or type(error).__name__)
            self.over.set()
        else:
            self._connection.notify("listening")

    async def _listen(self, config: Config, facts: Facts, addresses: Sequence[Address], control: str) -> None:
        clock = Clock()
        self._keys = keys = Keys(
            facts.ring.secrets[0], admin_secret=config.admin_secret, traffic=config.traffic
        )
        keys.ring = facts.ring
        self._ledger_port = ledger_port = RemotePort(self._connection, facts)
        engines = Engines(
            config.upstreams, lambda model: ledger_port.serving.upstreams(model), lambda: ledger_port.serving.models()
        )
        audit = audited(
            lambda line: self._connection.notify("audit", line), keys=keys, now=clock.now, headers=headers_as_sent
        )
        application = front.application(config, keys, audit)
        forwarding = ControlForwarding(control, keys=keys, clock=clock, max_body=config.max_body, budget=self._budget)
        forwarding.add_routes(application)
        HttpFront(
            config, facts.daemon, ledger_port=ledger_port, keys=keys, engines=engines, clock=clock,
            metrics=self._metrics, budget=self._budget,
        ).add_routes(application)
        self._runner = front.runner(config, application)
        await self._runner.setup()
        secured = tls.listening(config)
        for address in addresses:
            await web.TCPSite(
                self._runner, *address, ssl_context=secured, backlog=front.BACKLOG, reuse_port=True
            ).start()

    def _take(self, facts: Facts) -> None:
        self._ledger_port.serving = facts
        self._keys.ring = facts.ring

    async def _drain(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self.over.set()


async def serve(wire: socket.socket) -> None:
    """Work for the daemon at the other end of `wire`, until it says to stop."""
    connection: WorkerConnection
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: WorkerConnection(VALUES, Worker), sock=wire
    )
    assert isinstance(connection.peer, Worker)
    await connection.peer.over.wait()
    connection.close()


def main() -> None:
    for number in endings():
        signal.signal(number, signal.SIG_IGN)
    become_child(WORKER)
    log_to_stderr()
    if program() != sys.argv[2]:
        sys.exit("ajet-proxy: another version was installed while the daemon runs: restart the daemon")
    allow_many_connections()
    look_for_garbage_less()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
