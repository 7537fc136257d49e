"""The mitmproxy addon that decides where each intercepted connection goes: to the HTTP front, or to where it was meant.

| mode | the host is known from | who the caller is |
|---|---|---|
| regular | the ``CONNECT`` line | the key in the proxy's address, sent with ``CONNECT`` |
| socks5 | the name asked for; for an address, the SNI | the same, where the proxy needs keys |
| transparent | the SNI | what the request itself says |
| local | the SNI | what the request itself says |

Invariant: of a connection to a host that is not listed, nothing is read but the name in its first TLS message. Even
that is read only where no name was asked for. mitmproxy's HTTP layer sees ``CONNECT`` lines and nothing else.

Connections are opened at once (``eager``). So protocols in which the server speaks first work, and a host that cannot
be reached is an error at once. Only on port 443 of a bare address must the client speak first. That connection goes to
the front until the SNI is there, and is given up for the true one if the host is not listed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from mitmproxy import connection, http, tls
from mitmproxy.addonmanager import Loader
from mitmproxy.addons.tlsconfig import TlsConfig
from mitmproxy.certs import CertStoreEntry
from mitmproxy.connection import Server
from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers import ClientTLSLayer, HttpLayer, TCPLayer, UDPLayer
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.proxy.layers.modes import HttpProxy, Socks5AuthData
from mitmproxy.proxy.layers.tls import parse_client_hello
from mitmproxy.proxy.server import ConnectionHandler
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from ajet_proxy.core.identity.keys import proxy_key_in
from ajet_proxy.io.http.aiohttp_internals import MAX_HEADER, PATIENCE_S
from ajet_proxy.io.intercept.tunnels import REALM, Address, Caller, Tunnels
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.settings import is_address, is_loopback
from ajet_sdk.bodies import KEY_PREFIX
from ajet_sdk.sockets import watching

logger = logging.getLogger(__name__)

TLS_PORT = 443
TLS_HANDSHAKE = b"\x16"
MAX_HELLO = 1 << 16
"""Bytes. For each piece that comes mitmproxy reads all of a hello again, and would read on to 16 MiB."""
CONNECT = b"CONNECT "
HEAD_END = re.compile(rb"\n\r?\n")
EXPLICIT = ("regular", "socks5")
"""Modes in which the caller names the destination, and not the routing table of its machine."""
NONE = Caller(key=None, admitted=True)


class Diversion:
    """Sends what is meant for a listed host to `front`."""

    name = "nextlayer"  # so that mitmproxy does not miss its own addon for this decision

    def __init__(
        self, front: Address, tunnels: Tunnels, metrics: Metrics, handlers: Mapping[Any, ConnectionHandler]
    ) -> None:
        """`handlers` are mitmproxy's own, by the id of the client's connection."""
        self._front = front
        self._tunnels = tunnels
        self._metrics = metrics
        self._handlers = handlers
        self._callers: dict[str, Caller] = {}
        """By the id of the client's connection; without an entry nothing is known of the caller."""
        self._unsaid: dict[str, asyncio.TimerHandle] = {}
        """By the same id: when to give up a client of which it is not clear yet what it wants."""
        self._meant: dict[str, Address] = {}
        """By the id of a connection to the front: where it was meant to go."""
        self._settled: set[str] = set()
        """Ids of connections to where they were meant to go, now that no SNI can say more."""
        self._open: dict[str, tuple[Address, Caller]] = {}
        """By that id, while it is open: where it comes from, and whose it is."""
        self._relayed: set[tuple[Address, Address]] = set()
        """The ends of our own connections to where they were meant to go."""

    def load(self, loader: Loader) -> None:
        loader.add_option("proxyauth", str, "", "Whether mitmproxy's SOCKS layer asks for a name and a password.")

    def client_connected(self, client: connection.Client) -> None:
        """A client may be gone without a word, or never say what it wants; mitmproxy itself notices neither."""
        if isinstance(writer := self._writer(client), asyncio.StreamWriter):  # which those of the kind `local` are not
            for option in watching(0):
                writer.get_extra_info("socket").setsockopt(*option)
        self._unsaid[client.id] = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, client)

    def client_disconnected(self, client: connection.Client) -> None:
        self._callers.pop(client.id, None)
        self._said(client)

    def _said(self, client: connection.Client) -> None:
        """It is clear what `client` wants, or it is gone."""
        if (deadline := self._unsaid.pop(client.id, None)) is not None:
            deadline.cancel()

    def _give_up(self, client: connection.Client) -> None:
        known = self._handlers[client.id].transports.get(client)
        if known is not None and known.handler is not None:
            known.handler.cancel()

    def _writer(self, client: connection.Client) -> Any:
        known = self._handlers[client.id].transports.get(client)
        return None if known is None else known.writer

    # Who is it?

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """A program asks for a tunnel."""
        key = proxy_key_in(flow.request.headers.get("Proxy-Authorization"))
        refusal = self._tunnels.refusal(key)
        if refusal is None:
            self._callers[flow.client_conn.id] = Caller(key, admitted=True)
        else:
            flow.response = http.Response.make(407, headers={"Proxy-Authenticate": REALM, "Connection": "close"})
            _explain(flow.response, refusal)

    def http_connect_error(self, flow: http.HTTPFlow) -> None:
        """The tunnel's other end cannot be reached. Our words replace mitmproxy's, which speak of its options."""
        if flow.response is not None and flow.response.status_code == 502:
            reason = flow.server_conn.error or "no connection"
            _explain(flow.response, f"cannot reach {flow.request.pretty_host}: {reason}")

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """End what follows a refused ``CONNECT`` on its connection: mitmproxy must not carry it."""
        flow.kill()

    def socks5_auth(self, data: Socks5AuthData) -> None:
        """A SOCKS caller gives its key as its user name."""
        key = data.username if data.username.startswith(KEY_PREFIX) else None
        data.valid = self._tunnels.refusal(key) is None
        self._callers[data.client_conn.id] = Caller(key, admitted=True)

    # Where to?

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """A connection is about to be made: to the front, if it may be for a listed host."""
        await asyncio.sleep(0)  # let mitmproxy begin to read the client: an error before that would never close it
        server, mode = data.server, data.client.proxy_mode
        diverted = server.id in self._meant
        if diverted or server.error or server.address is None:
            return
        host, port = server.address[:2]
        if server.transport_protocol != "tcp":
            server.error = "QUIC: the program falls back to TLS over TCP" if port == TLS_PORT else None
            return
        explicit, came_to = mode.type_name in EXPLICIT, self._came_to(data.client)
        end = data.client.peername if explicit else came_to  # what a firewall redirects here comes to loopback
        unsaid = server.id not in self._settled
        by_sni = unsaid and mode.type_name != "regular" and port == TLS_PORT and is_address(host)
        if self._tunnels.lists(host) or by_sni:
            self._divert(server, (host, port))
        elif mode.type_name == "transparent" and (host, port) == came_to:
            server.error = "this connection was not redirected here"
        elif (data.client.peername[:2], (host, port)) in self._relayed:
            server.error = "the firewall redirects this daemon's own connections to it: its rules must spare our user"
        elif end is not None and not is_loopback(end[0]):
            await _stay_outside(server, host, port)
        if server.error and not explicit:
            logger.warning("refused a connection to %s port %s: %s", host, port, server.error)

    def _came_to(self, client: connection.Client) -> Address | None:
        """The address of ours that the connection of `client` has come to, whatever it was meant for. The kind `local`
        comes to none."""
        writer = self._writer(client)
        return writer.get_extra_info("sockname")[:2] if isinstance(writer, asyncio.StreamWriter) else None

    def server_connected(self, data: ServerConnectionHookData) -> None:
        """Tell the front whose connection it is, before a byte runs over it."""
        if data.server.id in self._meant and data.server.sockname is not None:
            opened = data.server.sockname[:2], self._callers.get(data.client.id, NONE)
            self._open[data.server.id] = opened
            self._tunnels.open(*opened)
        else:
            self._relayed.add(_ends(data.server))

    def server_disconnected(self, data: ServerConnectionHookData) -> None:
        self._forget(data.server)
        self._relayed.discard(_ends(data.server))
        if opened := self._open.pop(data.server.id, None):
            self._tunnels.close(*opened)

    def server_connect_error(self, data: ServerConnectionHookData) -> None:
        self._forget(data.server)

    def _forget(self, server: Server) -> None:
        self._meant.pop(server.id, None)
        self._settled.discard(server.id)

    def _divert(self, server: Server, meant: Address) -> None:
        self._meant[server.id] = meant
        server.address = self._front

    # How?

    def next_layer(self, nextlayer: layer.NextLayer) -> None:
        """Choose what handles a connection, once its first bytes are there."""
        self._choose(nextlayer)
        if isinstance(nextlayer.layer, TCPLayer | UDPLayer):
            self._said(nextlayer.context.client)

    def _choose(self, nextlayer: layer.NextLayer) -> None:
        context, first = nextlayer.context, nextlayer.data_client()
        if context.client.transport_protocol == "udp":
            nextlayer.layer = UDPLayer(context, ignore=True)
        elif isinstance(context.layers[0], HttpProxy) and not any(isinstance(one, HttpLayer) for one in context.layers):
            nextlayer.layer = self._asked(context, first)
        elif isinstance(context.layers[-1], ClientTLSLayer):
            nextlayer.layer = TCPLayer(context, ignore=True)
        elif context.server.id not in self._meant:
            self._count("tunnelled")
            nextlayer.layer = TCPLayer(context, ignore=True)
        else:
            nextlayer.layer = self._meant_for(context, first, self._meant[context.server.id])

    def _asked(self, context: Context, first: bytes) -> layer.Layer | None:
        """The layer that a caller of the HTTPS proxy asks for; None while it has not said enough."""
        if first[:1] == TLS_HANDSHAKE and isinstance(context.layers[-1], HttpProxy) and len(first) < MAX_HELLO:
            return None if _goes_on(first) else ClientTLSLayer(context)  # an https:// proxy
        if first.startswith(CONNECT) and HEAD_END.search(first):
            return HttpLayer(context, HTTPMode.regular)
        if CONNECT.startswith(first) or (first.startswith(CONNECT) and len(first) <= MAX_HEADER):
            return None  # mitmproxy would keep a head of any length; the front refuses one that is too long
        self._callers[context.client.id] = Caller(key=None, admitted=False)
        self._divert(context.server, self._front)
        self._count("plain")
        return TCPLayer(context, ignore=True)

    def _meant_for(self, context: Context, first: bytes, meant: Address) -> layer.Layer | None:
        """The layer that carries a connection to the front, now that the client has spoken; None if it has not said
        enough."""
        is_tls = first[:1] == TLS_HANDSHAKE and len(first) < MAX_HELLO
        if is_tls and _goes_on(first):
            return None
        host = meant[0] if self._tunnels.lists(meant[0]) else _sni(first) if is_tls else None
        if host is None or not self._tunnels.lists(host):
            self._count("tunnelled")
            elsewhere = Elsewhere(context, meant)
            self._settled.add(context.server.id)
            return elsewhere
        self._count("captured")
        return ClientTLSLayer(context) if is_tls else TCPLayer(context, ignore=True)

    def tls_failed_client(self, data: tls.TlsData) -> None:
        """A program's TLS handshake with us failed. Most often it does not trust our CA."""
        self._count("tls_failed")
        logger.warning("a program got no TLS with us; does it trust the CA? %s", data.conn.error)

    def _count(self, kind: str) -> None:
        self._metrics.inc("ajet_intercepted_connections_total", kind=kind)

    def certificate_host(self, context: Context) -> str | None:
        """The host that a client believes it has reached."""
        meant = self._meant.get(context.server.id)
        return context.client.sni or (meant[0] if meant is not None else None)


class Elsewhere(TCPLayer):
    """Relays to where a connection was meant to go. It gives up the connection to the front that it had until then."""

    def __init__(self, context: Context, meant: Address) -> None:
        super().__init__(context, ignore=True)
        self._given_up = context.server
        context.server = Server(address=meant)

    def handle_event(self, event: events.Event) -> layer.CommandGenerator[None]:
        if isinstance(event, events.Start):
            yield commands.CloseConnection(self._given_up)
        if not isinstance(event, events.ConnectionEvent) or event.connection is not self._given_up:
            yield from super().handle_event(event)


class Certificates(TlsConfig):
    """Certificates for exactly the host that the client believes to reach."""

    def __init__(self, diversion: Diversion) -> None:
        self._diversion = diversion

    def get_cert(self, conn_context: Context) -> CertStoreEntry:
        host = self._diversion.certificate_host(conn_context)
        if host is None:
            return super().get_cert(conn_context)
        named = x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)
        return self.certstore.get_cert(host, [named])


def _ends(server: Server) -> tuple[Address, Address]:
    """From where to where a connection goes."""
    assert server.sockname is not None and server.peername is not None
    return server.sockname[:2], server.peername[:2]


def _goes_on(first: bytes) -> bool:
    """True if more belongs to the TLS hello that `first` begins."""
    try:
        return parse_client_hello(first) is None
    except ValueError:
        return False


def _sni(first: bytes) -> str | None:
    """The name in a whole TLS hello."""
    try:
        hello = parse_client_hello(first)
    except ValueError:
        return None
    return None if hello is None else hello.sni


def _explain(response: http.Response, reason: str) -> None:
    """Say why there is no tunnel in the status line, where clients show it. Hardly any shows the body."""
    said = "".join(char for char in f"ajet-proxy: {reason}" if " " <= char <= "~")
    response.reason, response.text = said, f"{said}\n"
    response.headers["Content-Type"] = "text/plain"


async def _stay_outside(server: Server, host: str, port: int) -> None:
    """Let a caller from another machine reach public addresses alone. What only this machine can reach, such as the
    engine's control routes, stays closed. The address that was checked is the one that is used."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        server.error = "no such host"
        return
    addresses = [str(item[4][0]) for item in found]
    public = next((address for address in addresses if is_public(address)), None)
    if public is None:
        server.error = "it has no public address, and callers from other machines reach no others through this proxy"
    else:
        server.address = (public, port)


def is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_global and not (mapped or found).is_multicast
