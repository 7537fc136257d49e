"""The daemon's worker processes: started, informed, watched, started again, drained.

Workers share the port (``SO_REUSEPORT``: the kernel gives each connection to one of them) and nothing else. Ledger,
journal and gate stay in this process, which each of them asks over a socket of its own. When a worker dies, the calls
that it had in flight are lost at once, and another one takes its place. When this process dies its workers end with it.

The port is held by a socket that does not listen. So it stays ours while a worker is being replaced, and a second
daemon on the same port is refused although it might share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ajet_proxy.io.ledger_port.local import LocalPort
from ajet_proxy.io.ledger_port.remote import VALUES, Facts
from ajet_proxy.io.ledger_port.remote_server import Notified, PortServer
from ajet_proxy.io.ledger_port.worker_connection import WorkerConnection
from ajet_proxy.io.runtime.metrics import Figures, Metrics
from ajet_proxy.io.runtime.process import cannot_listen, program
from ajet_proxy.own_address import Address

logger = logging.getLogger(__name__)

SOCKET = "workers.sock"
START_S = 60.0
WATCH_S = 1.0
SILENT_S = 30.0
"""A worker that listens and answers nothing for so long hangs. One that starts has `START_S`. It is asked twice in that
time: a daemon that stood still itself has yet to read the first answer."""
STEADY_S = 60.0
"""A worker that lived for so long is replaced without delay."""
WAITS_S = (0.1, 30.0)
"""The first wait before a worker is replaced, which doubles, and the longest."""
PATIENCE_S = 3.0
"""The workers of a daemon that was killed need a moment to see that it is gone."""


@dataclass(slots=True)
class _Slot:
    """One worker's place."""

    number: int
    ready: asyncio.Future[None]
    process: Process | None = None
    connection: WorkerConnection | None = None
    listening: bool = False
    figures: Figures = field(default_factory=dict)


class Workers:
    """`number` workers with the configuration `settings`. Each asks `ledger_port`; `facts` gives what all know."""

    def __init__(
        self, number: int, settings: Mapping[str, Any], *, ledger_port: LocalPort, facts: Callable[[], Facts],
        audit: Notified, metrics: Metrics, data_dir: Path, drain_s: float,
    ) -> None:
        self._settings = settings
        self._ledger_port = ledger_port
        self._facts = facts
        self._known = facts()
        self._audit = audit
        self._metrics = metrics
        self._gone = Metrics()
        self._drain_s = drain_s
        self._directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
        self._program = program()
        self._held: list[socket.socket] = []
        self._addresses: list[Address] = []
        self._stopping = False
        self._budget: int | None = None
        loop = asyncio.get_running_loop()
        self._slots = [_Slot(number, loop.create_future()) for number in range(1, number + 1)]
        self._keepers: list[asyncio.Task[None]] = []

    def control_socket(self) -> socket.socket:
        """The socket to which the workers bring control requests. Only our user may connect."""
        where = self._control
        with contextlib.suppress(FileNotFoundError):
            os.unlink(where)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(where)
        os.chmod(where, 0o600)
        return made

    async def start(self, address: Address) -> Address:
        """Start them all. Returns the real address once each of them listens; `OSError` if one cannot."""
        self._held = await _reserve(address)
        self._addresses = [held.getsockname()[:2] for held in self._held]
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(slot)) for slot in self._slots]
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(slot.ready for slot in self._slots))
        return self._addresses[0]

    async def stop(self) -> None:
        """Let them finish what they do, for up to `drain_s`."""
        self._stopping = True
        for slot, keeper in zip(self._slots, self._keepers, strict=False):
            if slot.connection is None:
                keeper.cancel()
            else:
                slot.connection.notify("drain")
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=self._drain_s)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for held in self._held:
            held.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._control)
        os.close(self._directory)

    def send_facts(self) -> None:
        """Send the workers what they must know, if that has changed."""
        facts = self._facts()
        if facts != self._known:
            self._known = facts
            for connection in self._connections():
                connection.notify("facts", facts)

    def share(self, left: int) -> int:
        """Divide `left` bytes of memory among all processes, this one included. Returns the share of each."""
        self._budget = left // (1 + len(self._slots))
        for connection in self._connections():
            connection.notify("budget", self._budget)
        return self._budget

    async def caught_up(self) -> None:
        """Return once every worker has taken in what was sent to it; its figures come with that."""
        await asyncio.gather(*(self._ask(slot) for slot in self._slots), return_exceptions=True)

    async def metrics(self) -> Metrics:
        """The metrics of all processes, workers that are gone included."""
        await self.caught_up()
        total = Metrics()
        for figures in (self._metrics.figures(), self._gone.figures(), *(slot.figures for slot in self._slots)):
            total.add(figures)
        return total

    @property
    def listening(self) -> int:
        """The number of workers that listen."""
        return sum(slot.listening for slot in self._slots)

    def pids(self) -> dict[int, int]:
        """The process of each worker that runs, by its number."""
        return {slot.number: slot.process.pid for slot in self._slots if slot.process is not None}

    @property
    def _control(self) -> str:
        """The control socket's path: short however deep the data directory lies, and the same in a worker."""
        return f"/proc/self/fd/{self._directory}/{SOCKET}"

    def _connections(self) -> Iterator[WorkerConnection]:
        return (slot.connection for slot in self._slots if slot.connection is not None)

    async def _ask(self, slot: _Slot) -> None:
        if slot.connection is not None:
            async with asyncio.timeout((SILENT_S if slot.listening else START_S) / 2):
                slot.figures = await slot.connection.ask("figures")

    async def _keep(self, slot: _Slot) -> None:
        """Run a worker in `slot`, and another one whenever it ends."""
        loop, wait = asyncio.get_running_loop(), 0.0
        while True:
            began = loop.time()
            try:
                how = f"status {await self._run(slot)}"
            except OSError as error:
                how = str(error)
            if self._stopping:
                return
            if not slot.ready.done():
                slot.ready.set_exception(OSError(f"worker {slot.number} ended before it listened: {how}"))
                return
            first, longest = WAITS_S
            wait = first if loop.time() - began > STEADY_S else min(max(2 * wait, first), longest)
            self._metrics.inc("ajet_worker_restarts_total")
            logger.error("worker %d ended (%s); another one starts in %.1f s", slot.number, how, wait)
            await asyncio.sleep(wait)

    async def _run(self, slot: _Slot) -> int:
        """Run one worker to its end; returns its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            slot.process = process = await create_subprocess_exec(
                sys.executable, "-P", "-m", "ajet_proxy.worker", str(number), self._program,
                pass_fds=(number, self._directory), stdin=DEVNULL, stdout=DEVNULL,
            )
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: WorkerConnection(VALUES, lambda made: self._port_server(slot, made)), sock=ours
            )
            slot.connection = connection
            if self._budget is not None:
                connection.notify("budget", self._budget)
            connection.notify("start", self._settings, self._known, self._addresses, self._control)
            watch = loop.create_task(self._watch(slot, process))
            try:
                return await process.wait()
            finally:
                watch.cancel()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            slot.process = None

    async def _watch(self, slot: _Slot, process: Process) -> None:
        """Check again and again that the worker answers, and fetch what it counted."""
        unanswered = 0
        while slot.connection is not None:
            try:
                await self._ask(slot)
                unanswered = 0
            except TimeoutError:
                unanswered += 1
                if unanswered < 2:
                    continue
                logger.error("worker %d does not answer and is killed", slot.number)
                process.kill()
            except ConnectionError:
                return
            await asyncio.sleep(WATCH_S)

    def _port_server(self, slot: _Slot, connection: WorkerConnection) -> PortServer:
        def gone() -> None:
            slot.connection, slot.listening = None, False
            self._gone.add(slot.figures)
            slot.figures = {}

        def ready(problem: str | None = None) -> None:
            slot.listening = problem is None
            if problem is None and not slot.ready.done():
                slot.ready.set_result(None)
            elif not slot.ready.done():
                slot.ready.set_exception(OSError(problem))
            elif problem is not None:
                logger.error("worker %d cannot serve: %s", slot.number, problem)

        more: dict[str, Notified] = {"listening": ready, "failed": ready, "audit": self._audit}
        return PortServer(self._ledger_port, notify=connection.notify, more=more, gone=gone)


async def _reserve(address: Address) -> list[socket.socket]:
    """Sockets that hold `address`, one for each of its families, and do not listen."""
    loop = asyncio.get_running_loop()
    host, port = address
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    held: list[socket.socket] = []
    deadline = loop.time() + PATIENCE_S
    with contextlib.ExitStack() as unless_all:
        for family, *_, where in dict.fromkeys(found):
            exact = (where[0], port, *where[2:])
            while True:
                try:
                    held.append(unless_all.enter_context(_hold(family, exact)))
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or loop.time() > deadline:
                        raise cannot_listen(str(where[0]), port, error) from error
                await asyncio.sleep(0.1)
            port = held[0].getsockname()[1]
        unless_all.pop_all()
    return held


def _hold(family: int, where: Sequence[Any]) -> socket.socket:
    if where[1]:
        with _socket(family) as probe:  # refused by another daemon's sockets, which ours could share the port with
            probe.bind(tuple(where))
    with contextlib.ExitStack() as unless_bound:
        made = unless_bound.enter_context(_socket(family))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(tuple(where))
        unless_bound.pop_all()
    return made


def _socket(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made
