"""The second front: programs that hard-code a provider's address are caught on the way there.

mitmproxy listens, in one or more of its modes, and ends the TLS of listed hosts with certificates of our own CA. The
decrypted bytes go, unread, to the HTTP front, which alone parses and captures. Every other host is tunnelled as it is.
mitmproxy's HTTP layer never sees an LLM call. Measured, this takes a third of its processor time. None of its faults as
a data path apply either: one retry less, a 600 s limit, five connections a client.

`ajet_proxy.io.intercept.diversion` decides which connection is which, `ajet_proxy.io.intercept.tunnels` tells the front
whose it is, and `ajet_proxy.io.intercept.authority` keeps the CA.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mitmproxy import options
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.master import Master

from ajet_proxy.io.intercept import authority
from ajet_proxy.io.intercept.diversion import Certificates, Diversion
from ajet_proxy.io.intercept.tunnels import Tunnels
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.runtime.process import WORKER
from ajet_proxy.settings import Mode
from ajet_sdk.ports import listener

logger = logging.getLogger(__name__)
logging.getLogger("mitmproxy.addons.proxyserver").setLevel(logging.CRITICAL)  # `start` raises what it would say
logging.getLogger("mitmproxy.proxy.server").setLevel(logging.ERROR)  # `Diversion` tells of clients without trust

CLOSE_TURNS = 500
LOOKUPS = 256
"""Threads. Each host that is not listed is looked up in one, for as long as a silent name server takes. The default of
a few would be taken by then, and the daemon reads its archive and makes batches in the same."""
SILENCE_S = 7 * 86400
"""mitmproxy cuts connections that are silent for this long; its default of 600 s would cut a slow generation."""


class Interceptor:
    """mitmproxy with the few addons that this needs, in the daemon's own event loop."""

    def __init__(self, *, directory: Path, modes: Sequence[Mode], tunnels: Tunnels, metrics: Metrics) -> None:
        self.directory = directory
        self.listening: tuple[Mode, ...] = ()
        self._modes = modes
        self._tunnels = tunnels
        self._metrics = metrics
        self._master: Master | None = None
        self._server = Proxyserver()

    async def start(self, front: tuple[str, int]) -> None:
        """Listen and relay to `front`. Raises `OSError` or `AuthorityError` if it cannot."""
        authority.prepare(self.directory)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOKUPS, "ajet-lookup"))
        diversion = Diversion(front, self._tunnels, self._metrics, self._server.connections)
        self._master = Master(options.Options(confdir=str(self.directory), mode=[_spec(mode) for mode in self._modes]))
        self._master.addons.add(self._server, diversion, Certificates(diversion))
        self._master.options.update(
            connection_strategy="eager", http2=False, tcp_timeout=SILENCE_S, upstream_cert=False,
            proxyauth="keys" if self._tunnels.needs_key else "",
        )
        if not await self._server.setup_servers():
            faults = [item.last_exception for item in self._server.servers if item.last_exception]
            reason = "; ".join(str(fault).partition("Stack backtrace")[0].strip() for fault in faults)
            ports = [mode.address[1] for mode in self._modes if mode.address is not None]
            who = "".join(f"; {found} listens on port {port}" for port in ports if (found := listener(port)))
            await self.close()
            raise OSError(f"cannot intercept: {reason or 'unknown reason'}{who}")
        await self._master.running()
        bundle = authority.write_bundle(self.directory)
        self.listening = tuple(
            Mode(item.mode.type_name, _first(item.listen_addrs)) for item in self._server.servers
        )
        where = ", ".join(map(_spec, self.listening))
        logger.info("intercepting %s; programs must trust %s", where, bundle)

    async def stop(self) -> None:
        """Accept nothing more; connections go on."""
        await self._server.servers.update([])

    async def close(self) -> None:
        """Drop what is left of the connections."""
        await self.stop()
        for handler in tuple(self._server.connections.values()):
            transport = handler.transports.get(handler.client)
            if transport is not None and transport.handler is not None:
                transport.handler.cancel()
        for _ in range(CLOSE_TURNS):
            if not self._server.connections:
                break
            await asyncio.sleep(0.01)
        if self._master is not None:
            await self._master.done()
            self._master = None


def _spec(mode: Mode) -> str:
    """`mode` as mitmproxy writes it. It spares this process by itself, and none of its workers."""
    if mode.address is None:
        return f"{mode.kind}:{mode.programs},!{WORKER}" if mode.programs else mode.kind
    return f"{mode.kind}@{mode.address[0]}:{mode.address[1]}"


def _first(addresses: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
    return (str(addresses[0][0]), int(addresses[0][1])) if addresses else None
