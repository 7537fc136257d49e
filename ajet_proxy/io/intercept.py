"""The second front: an HTTPS proxy for programs that hard-code a provider's address.

A program with ``HTTPS_PROXY`` set asks for a tunnel to, say, ``api.openai.com:443``. For the hosts on the list
mitmproxy ends the TLS with a certificate of our own CA and relays the decrypted bytes, unread, to the HTTP front,
which alone parses and captures. Every other host is tunnelled as it is. mitmproxy's HTTP layer never sees an LLM
call: measured, that costs a third, and none of its faults as a data path apply (one retry less, a 600 s limit, five
connections a client).

Invariant: bytes for a host that is not listed are never decrypted.

The CA is made once in the data directory; ``ca-bundle.pem`` beside it holds the system's certificates and ours, because
most programs replace their trust store by the one they are told of.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from mitmproxy import options, tls
from mitmproxy.addons.next_layer import NextLayer
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.addons.tlsconfig import TlsConfig
from mitmproxy.master import Master
from mitmproxy.proxy import layer
from mitmproxy.proxy.layers import ClientTLSLayer, TCPLayer
from mitmproxy.proxy.layers.http import HttpLayer

from ajet_proxy.io.metrics import Metrics

logger = logging.getLogger(__name__)

SILENCE_S = 7 * 86400
"""mitmproxy cuts connections that are silent for this long; its default of 600 s would cut a slow generation."""
TLS_HANDSHAKE = 0x16


class Relay:
    """The mitmproxy addon that decides what a tunnel carries."""

    def __init__(self, front: tuple[str, int], hosts: tuple[str, ...], metrics: Metrics) -> None:
        self._front = front
        self._hosts = frozenset(host.lower() for host in hosts)
        self._metrics = metrics

    def next_layer(self, nextlayer: layer.NextLayer) -> None:
        """Inside a tunnel: TLS of a listed host is ended here, its content goes to the front, all else passes by."""
        context = nextlayer.context
        if not any(isinstance(item, HttpLayer) for item in context.layers) or context.server.address is None:
            return
        if context.client.tls_established:
            context.server.address = self._front
            nextlayer.layer = TCPLayer(context, ignore=True)
        elif context.server.address[0].lower() not in self._hosts:
            self._metrics.inc("ajet_intercepted_connections_total", kind="tunnelled")
            nextlayer.layer = TCPLayer(context, ignore=True)
        elif first := nextlayer.data_client()[:1]:
            self._metrics.inc("ajet_intercepted_connections_total", kind="captured")
            if first[0] == TLS_HANDSHAKE:
                nextlayer.layer = ClientTLSLayer(context)
            else:
                context.server.address = self._front
                nextlayer.layer = TCPLayer(context, ignore=True)

    def tls_failed_client(self, data: tls.TlsData) -> None:
        """Most often the program does not trust our CA."""
        self._metrics.inc("ajet_intercepted_connections_total", kind="tls_failed")
        logger.warning("a client refused our certificate (%s); is SSL_CERT_FILE set to the bundle?", data.conn.error)


class Interceptor:
    """mitmproxy with the few addons that this needs, in the daemon's own event loop."""

    def __init__(self, *, directory: Path, hosts: tuple[str, ...], metrics: Metrics) -> None:
        self.directory = directory
        self._hosts = hosts
        self._metrics = metrics
        self._master: Master | None = None
        self._server: Proxyserver | None = None

    @property
    def bundle(self) -> Path:
        """The certificates a program must trust: the system's and our CA's."""
        return self.directory / "ca-bundle.pem"

    async def start(self, listen: tuple[str, int], front: tuple[str, int]) -> tuple[str, int]:
        """Listen, relay to `front`, and return the real address; `OSError` if the address cannot be had."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        master = Master(options.Options(confdir=str(self.directory), listen_host=listen[0], listen_port=listen[1]))
        server = Proxyserver()
        master.addons.add(server, Relay(front, self._hosts, self._metrics), NextLayer(), TlsConfig())
        master.options.update(connection_strategy="lazy", http2=False, tcp_timeout=SILENCE_S, upstream_cert=False)
        if not await server.setup_servers():
            raise OSError(f"cannot intercept on {listen[0]}:{listen[1]}: {_reason(server)}")
        await master.running()
        self._master, self._server = master, server
        self._write_bundle()
        host, port, *_ = server.listen_addrs()[0]
        return str(host), int(port)

    async def stop(self) -> None:
        """Stop accepting and drop what is left of the connections."""
        if self._master is not None and self._server is not None:
            await self._server.servers.update([])
            await self._master.done()
            self._master = self._server = None

    def _write_bundle(self) -> None:
        ours = (self.directory / "mitmproxy-ca-cert.pem").read_bytes()
        partial = self.bundle.with_suffix(".partial")
        partial.write_bytes(_system_certificates() + b"\n" + ours)
        partial.replace(self.bundle)


def _system_certificates() -> bytes:
    """The machine's trusted certificates (PEM), or certifi's where it has no bundle file."""
    paths = ssl.get_default_verify_paths()
    for candidate in (paths.cafile, paths.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if candidate and os.path.isfile(candidate):
            return Path(candidate).read_bytes()
    import certifi

    return Path(certifi.where()).read_bytes()


def _reason(server: Proxyserver) -> str:
    return "; ".join(str(item.last_exception) for item in server.servers if item.last_exception) or "unknown reason"
