"""Which connection goes where: listed hosts to the front, all others unread to where they were meant to go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from mitmproxy import connection, platform
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.io.intercept import diversion
from ajet_proxy.io.intercept.tunnels import Tunnels
from ajet_proxy.io.runtime.metrics import Metrics
from tests.kit.certificates import Authority
from tests.proxy.io.front import later, until
from tests.proxy.io.intercepting import KEY, KEYS, get, intercepting

HELLO = b"\x16\x03\x01\x00\x04\x01\xff\xff\xff"
"""The beginning of one of 16 MiB."""
RECORD = b"\x16\x03\x01\x00\x10" + bytes(16)
"""So it goes on."""


@contextlib.asynccontextmanager
async def elsewhere(*, speaks_first: bool = False, cert: tuple[str, str] | None = None) -> AsyncIterator[int]:
    """The port of a server that is not listed: it sends back what it gets, in capitals."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if speaks_first:
            writer.write(b"hello ")
        while data := await reader.read(1000):
            writer.write(data.upper())
        writer.close()

    context = None
    if cert is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*cert)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


def pinned(cert: str) -> bytes:
    """The certificate that a client expects to see, and no other."""
    return ssl.PEM_cert_to_DER_cert(Path(cert).read_text())


async def test_any_other_host_is_tunnelled_unread(tmp_path: Path) -> None:
    async with elsewhere() as port, intercepting(tmp_path / "ca") as running:
        reader, writer = await running.tunnel("127.0.0.1", port)
        for sent in (b"\x16\x03\x01\x00 not tls", b"GET /v1/models HTTP/1.1\r\nHost: api.openai.com\r\n\r\n"):
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent.upper()
        assert running.front.seen == []
        assert (running.counted("tunnelled"), running.counted("captured")) == (1, 0)


@pytest.mark.parametrize("mode", ["regular", "socks5"])
async def test_another_hosts_certificate_is_its_own(tmp_path: Path, mode: str) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("here")
    async with elsewhere(cert=(pair.cert, pair.key)) as port, intercepting(tmp_path / "ca", mode) as running:
        reader, writer = await running.tunnel("127.0.0.1", port)
        await writer.start_tls(ssl.create_default_context(cafile=authority.file), server_hostname="127.0.0.1")
        assert writer.get_extra_info("ssl_object").getpeercert(binary_form=True) == pinned(pair.cert)
        writer.write(b"quiet")
        assert await reader.readexactly(5) == b"QUIET"
        assert running.front.seen == []
        assert running.counted("captured") == 0


@pytest.mark.parametrize("mode", ["regular", "socks5"])
async def test_a_server_that_speaks_first_is_heard(tmp_path: Path, mode: str) -> None:
    async with elsewhere(speaks_first=True) as port, intercepting(tmp_path / "ca", mode) as running:
        reader, writer = await running.tunnel("127.0.0.1", port)
        assert await reader.readexactly(6) == b"hello "
        writer.write(b"you")
        assert await reader.readexactly(3) == b"YOU"


async def test_a_host_that_cannot_be_reached_is_an_error_at_once(tmp_path: Path) -> None:
    async with elsewhere() as port:
        pass
    async with intercepting(tmp_path / "ca") as running:
        status, (reader, _) = await running.connect(f"127.0.0.1:{port}")
        assert status.startswith(b"HTTP/1.1 502 ajet-proxy: cannot reach 127.0.0.1: ")
        assert (await reader.read(1000)).startswith(b"ajet-proxy: cannot reach 127.0.0.1: ")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost."])
@pytest.mark.parametrize("mode", ["regular", "socks5"])
async def test_a_listed_host_reaches_the_front_with_a_certificate_for_it_alone(
    tmp_path: Path, mode: str, host: str
) -> None:
    async with intercepting(tmp_path / "ca", mode) as running:
        connection = await running.tunnel(host, 443)
        await connection[1].start_tls(running.trusting(), server_hostname="localhost")
        shown = connection[1].get_extra_info("ssl_object").getpeercert()
        assert shown["subjectAltName"] == (("DNS", "localhost"),)
        assert (await get(connection, "/v1/models", host))[0] == 200
        assert running.front.seen == [("GET", "/v1/models", host)]


@pytest.mark.parametrize("host", ["api.openai.com", "127.0.0.1"])
async def test_without_a_name_asked_for_socks_goes_by_the_sni(tmp_path: Path, host: str) -> None:
    async with intercepting(tmp_path / "ca", "socks5") as running:
        connection = await running.tunnel("127.0.0.1", 443)
        if host == "127.0.0.1":
            connection[1].write(b"no tls at all")
            assert await connection[0].read(100) == b""  # nothing listens at the true address
            assert (running.counted("tunnelled"), running.counted("captured")) == (1, 0)
        else:
            await connection[1].start_tls(running.trusting(), server_hostname=host)
            assert (await get(connection, "/v1/models", host))[0] == 200
            assert running.counted("captured") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_whatever_the_pieces_of_its_hello_a_host_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """By its SNI one that is not listed, and by the name asked for one that is."""
    authority = Authority(tmp_path)
    pair, listed = authority.sign("here"), host == "localhost"
    async with elsewhere(cert=(pair.cert, pair.key)) as port, intercepting(tmp_path / "ca", "socks5") as running:
        monkeypatch.setattr(diversion, "TLS_PORT", port)
        reader, writer = await running.tunnel(host, port)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        trusting = running.trusting() if listed else ssl.create_default_context(cafile=authority.file)
        inside = trusting.wrap_bio(incoming, outgoing, server_hostname=host)
        with contextlib.suppress(ssl.SSLWantReadError):
            inside.do_handshake()
        hello = outgoing.read()
        for at in range(0, len(hello), 50):
            writer.write(hello[at : at + 50])
            await writer.drain()
            await asyncio.sleep(0.01)
        while True:
            incoming.write(await reader.read(65536))
            try:
                inside.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
        assert (inside.getpeercert(binary_form=True) == pinned(pair.cert)) is not listed
        writer.write(outgoing.read())
        inside.write(b"GET / HTTP/1.1\r\n")
        writer.write(outgoing.read())
        await until(lambda: running.counted("captured" if listed else "tunnelled"))
        assert (running.counted("tunnelled"), running.counted("captured")) == (not listed, listed)


@pytest.mark.parametrize(("begins", "more"), [
    (b"CONNECT ", b"a" * 1000), (b"CONNECT a:1 HTTP/1.1\r\n", b"x: y\r\n" * 100),
    (HELLO, RECORD), (b"CONNECT localhost:443 HTTP/1.1\r\n\r\n" + HELLO, RECORD),
])  # fmt: skip
async def test_a_beginning_without_an_end_is_not_kept(tmp_path: Path, begins: bytes, more: bytes) -> None:
    async with intercepting(tmp_path / "ca", needs_key=False) as running:
        reader, writer = await running.open()
        writer.write(begins)
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * diversion.MAX_HELLO // len(more)):
                writer.write(more)
                await writer.drain()
            while await reader.read(1000):
                pass
        assert running.counted("tls_failed") == 0 and running.front.seen == []


async def test_a_client_that_offers_http_2_speaks_http_1(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        context = running.trusting()
        context.set_alpn_protocols(["h2", "http/1.1"])
        connection = await running.tunnel("localhost", 443)
        await connection[1].start_tls(context, server_hostname="localhost")
        assert connection[1].get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        assert (await get(connection, "/v1/models", "localhost"))[0] == 200


async def test_plain_http_to_a_listed_host_reaches_the_front_too(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        for connection, target in (
            (await running.tunnel("localhost", 80), "/v1/models"),
            (await running.open(), "http://localhost/v1/models"),
        ):
            assert (await get(connection, target, "localhost"))[0] == 200
        assert running.front.seen == [("GET", "/v1/models", "localhost")] * 2


async def test_plain_http_to_any_other_host_is_refused_and_never_sent(tmp_path: Path) -> None:
    async with elsewhere() as port, intercepting(tmp_path / "ca") as running:
        for target, host in ((f"http://127.0.0.1:{port}/x", f"127.0.0.1:{port}"), ("/v1/models", f"127.0.0.1:{port}")):
            connection = await running.open()
            status, body = await get(connection, target, host)
            assert status == 403
            assert "not HTTP_PROXY" in body["error"]["message"]
            reused = await running.open()
        assert (await get(reused, "http://localhost/v1/models", "localhost"))[0] == 200
        assert (await get(reused, f"http://127.0.0.1:{port}/x", f"127.0.0.1:{port}"))[0] == 403
        assert len(running.front.seen) == 1


async def test_an_https_proxy_address_works_too(tmp_path: Path) -> None:
    async with elsewhere() as port, intercepting(tmp_path / "ca") as running:
        for target in ("localhost:443", f"127.0.0.1:{port}"):
            reader, writer = await running.open()
            await writer.start_tls(running.trusting(), server_hostname="127.0.0.1")
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(b"\x16\x03\x01\x00\x05pieces")
            if target.startswith("127"):
                assert await reader.readexactly(11) == b"\x16\x03\x01\x00\x05PIECES"
        assert running.front.seen == []


async def test_a_client_that_leaves_closes_the_connection_to_the_front(tmp_path: Path) -> None:
    left, came = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()
        left.set()
        writer.close()

    silent = await asyncio.start_server(wait, "127.0.0.1", 0)
    async with intercepting(tmp_path / "ca", to=silent.sockets[0].getsockname()[:2]) as running:
        connection = await running.tunnel("localhost", 443)
        await connection[1].start_tls(running.trusting(), server_hostname="localhost")
        await asyncio.wait_for(came.wait(), 300)
        assert not left.is_set()
        connection[1].transport.abort()
        await asyncio.wait_for(left.wait(), 300)
        silent.close()
        assert running.front.tunnels._callers == {}


async def test_a_client_that_never_says_what_it_wants_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has begun: nothing, the line for a tunnel, the tunnel itself, TLS, or words within TLS."""
    monkeypatch.setattr(diversion, "PATIENCE_S", 300.0)
    async with intercepting(tmp_path / "ca") as running:
        begun = [await running.open(), await running.open()]
        begun[1][1].write(b"CONNECT local")
        begun += [await running.tunnel("localhost", 443) for _ in range(3)]
        begun[3][1].write(b"\x16\x03\x01\x02\x00\x01")
        await begun[4][1].start_tls(running.trusting(), server_hostname="localhost")
        asked = await running.tunnel("localhost", 80)
        assert (await get(asked, "/v1/models", "localhost"))[0] == 200
        await later(monkeypatch, 300.0)
        assert [await reader.read() for reader, _ in begun] == [b""] * 5
        assert (await get(asked, "/v1/models", "localhost"))[0] == 200
        [handler] = running.interceptor._server.connections.values()
        known = handler.transports[handler.client].writer.get_extra_info("socket")
        assert known.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1  # its host may be gone without a word


@pytest.mark.parametrize("needs_key", [True, False])
async def test_a_key_in_the_proxys_address_is_checked_and_used(tmp_path: Path, needs_key: bool) -> None:
    forged, expired = KEY + "A", KEYS.issue(Claims("agent", expires=1.0))
    trainer = KEYS.issue(Claims("trainer"))
    async with intercepting(tmp_path / "ca", needs_key=needs_key) as running:
        for bad in (forged, expired, trainer, *([None, "sk-foreign"] if needs_key else [])):
            status, (reader, _) = await running.connect("localhost:443", bad)
            assert status.startswith(b"HTTP/1.1 407 ajet-proxy: this ")
            assert b'Proxy-Authenticate: Basic realm="ajet"' in status
            assert await reader.read() != b""  # the reason, and then the end
        connection = await running.tunnel("localhost", 80, KEY)
        assert (await get(connection, "/v1/models", "localhost", Authorization="Bearer sk-theirs"))[0] == 200
        assert running.front.headers[-1]["authorization"] == f"Bearer {KEY}"
        assert len(running.front.seen) == 1


async def test_what_follows_a_refused_tunnel_is_carried_nowhere(tmp_path: Path) -> None:
    async with elsewhere() as port, intercepting(tmp_path / "ca", needs_key=True) as running:
        reader, writer = await running.open()
        where = f"127.0.0.1:{port}"
        writer.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        writer.write(f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 407") and answer.count(b"HTTP/1.1") == 1


async def test_socks_takes_the_key_as_user_name_where_one_is_needed(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca", "socks5", needs_key=True) as running:
        for bad in (None, "sk-foreign", KEY + "A"):
            with pytest.raises(PermissionError):
                await running.tunnel("localhost", 80, bad)
        connection = await running.tunnel("localhost", 80, KEY)
        assert (await get(connection, "/v1/models", "localhost"))[0] == 200
        assert running.front.headers[-1]["authorization"] == f"Bearer {KEY}"


async def test_callers_from_other_machines_reach_public_addresses_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversion, "is_loopback", lambda host: False)  # as if the caller were on another machine
    async with elsewhere() as port, intercepting(tmp_path / "ca", needs_key=True) as running:
        status, (reader, _) = await running.connect(f"127.0.0.1:{port}", KEY)
        assert status.startswith(b"HTTP/1.1 502")
        assert b"no public address" in await reader.read(1000)
        connection = await running.tunnel("localhost", 80, KEY)  # listed, and so not looked up at all
        assert (await get(connection, "/v1/models", "localhost"))[0] == 200


async def test_by_sni_too_they_reach_public_addresses_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diversion, "is_loopback", lambda host: False)
    async with elsewhere() as port, intercepting(tmp_path / "ca", "socks5", needs_key=True) as running:
        monkeypatch.setattr(diversion, "TLS_PORT", port)
        reader, writer = await running.tunnel("127.0.0.1", port, KEY)
        writer.write(b"no name of a host")
        assert await reader.read(100) == b""


@pytest.mark.parametrize("redirected", [True, False])
async def test_a_connection_that_was_not_redirected_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redirected: bool
) -> None:
    """On port 443 too, and for a listener of many addresses."""
    async with elsewhere() as port, intercepting(tmp_path / "ca", "transparent", host="0.0.0.0") as running:
        monkeypatch.setattr(diversion, "TLS_PORT", port if redirected else running.port)
        meant = ("127.0.0.1", port) if redirected else ("127.0.0.2", running.port)
        monkeypatch.setattr(platform, "original_addr", lambda sock: meant)
        reader, writer = await asyncio.open_connection("127.0.0.2", running.port)
        writer.write(b"no tls")
        assert await reader.read(100) == (b"NO TLS" if redirected else b"")
        writer.close()


@pytest.mark.parametrize("port", [443, 53])
async def test_of_what_goes_by_udp_quic_alone_is_refused(port: int) -> None:
    """So that a program that the kernel redirects comes by TCP, where it is seen."""
    tunnels = Tunnels((), authenticate=lambda key: KEYS.authenticate(key, 0), needs_key=False)
    client = connection.Client(peername=("127.0.0.1", 1), sockname=("127.0.0.1", 2))
    server = connection.Server(address=("8.8.8.8", port), transport_protocol="udp")
    data = ServerConnectionHookData(server, client)
    await diversion.Diversion(("127.0.0.1", 3), tunnels, Metrics(), {}).server_connect(data)
    assert (server.error is not None, server.address) == (port == 443, ("8.8.8.8", port))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1", True), ("::ffff:8.8.8.8", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False),
        ("::ffff:127.0.0.1", False), ("fe80::1%eth0", False),
    ],
)
def test_what_is_a_public_address(address: str, public: bool) -> None:
    assert diversion.is_public(address) is public
