"""An interceptor before a stand-in for the HTTP front, and the hands to reach it with."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from ajet_proxy.core.identity.keys import Claims, Keys
from ajet_proxy.io.http.errors import error_middleware
from ajet_proxy.io.intercept.interceptor import Interceptor
from ajet_proxy.io.intercept.tunnels import Tunnels
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.settings import split_mode
from tests.kit.ports import free_port

HOSTS = ("api.openai.com", "localhost", "xn--bcher-kva.example")
KEYS = Keys(b"x" * 32, admin_secret="the secret of an operator")
KEY = KEYS.issue(Claims("agent", episode="ep-1"))


@dataclass
class Front:
    """Stands in for the HTTP front: notes what reaches it and answers like an engine."""

    tunnels: Tunnels
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    address: tuple[str, int] = ("", 0)

    async def answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        self.seen.append((http.method, http.path, http.host))
        self.headers.append({name.lower(): value for name, value in self.tunnels.headers(http).sent.items()})
        if body and json.loads(body).get("stream"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            for word in ("h", "i"):
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
                         "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        message = {"role": "assistant", "content": "hi"}
        return web.json_response({
            "id": "c", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        })


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Running:
    """An interceptor that listens at `port`, and connections to it, which end when the test does."""

    port: int
    interceptor: Interceptor
    metrics: Metrics
    front: Front
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bundle(self) -> str:
        return str(self.interceptor.directory / "ca-bundle.pem")

    def trusting(self) -> ssl.SSLContext:
        """The context of a client that trusts our CA."""
        return ssl.create_default_context(cafile=str(self.interceptor.directory / "mitmproxy-ca-cert.pem"))

    async def open(self) -> Connection:
        """A connection on which nothing was said yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def connect(self, target: str, key: str | None = None) -> tuple[bytes, Connection]:
        """The answer of the HTTPS proxy to the wish for a tunnel to `target`, and the connection."""
        reader, writer = await self.open()
        shown = ""
        if key is not None:
            shown = f"Proxy-Authorization: Basic {base64.b64encode(f'{key}:'.encode()).decode()}\r\n"
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{shown}\r\n".encode())
        return await reader.readuntil(b"\r\n\r\n"), (reader, writer)

    async def tunnel(self, host: str, port: int, key: str | None = None) -> Connection:
        """A connection through which this end and `host` talk."""
        if self.interceptor.listening[0].kind == "socks5":
            return await self._socks(host, port, key)
        status, connection = await self.connect(f"{host}:{port}", key)
        assert status.startswith(b"HTTP/1.1 200"), status
        return connection

    async def _socks(self, host: str, port: int, key: str | None) -> Connection:
        """By name, or by IPv4 address."""
        reader, writer = await self.open()
        writer.write(b"\x05\x01\x02" if key is not None else b"\x05\x01\x00")
        version, method = await reader.readexactly(2)
        assert version == 5
        if method == 0xFF:
            raise PermissionError
        if key is not None:
            writer.write(b"\x01" + bytes((len(key),)) + key.encode() + b"\x01x")
            if (await reader.readexactly(2))[1]:
                raise PermissionError
        parts = host.split(".")
        if all(part.isdigit() for part in parts):
            where = b"\x01" + bytes(int(part) for part in parts)
        else:
            where = b"\x03" + bytes((len(host),)) + host.encode()
        writer.write(b"\x05\x01\x00" + where + port.to_bytes(2, "big"))
        answer = await reader.readexactly(10)
        if answer[1]:
            raise ConnectionError(answer[1])
        return reader, writer

    def counted(self, kind: str) -> int:
        """The number of connections of a kind."""
        line = f'ajet_intercepted_connections_total{{kind="{kind}"}} '
        found = [row.removeprefix(line) for row in self.metrics.render().splitlines() if row.startswith(line)]
        return int(float(found[0])) if found else 0


@contextlib.asynccontextmanager
async def intercepting(
    directory: Path, mode: str = "regular", *, host: str = "127.0.0.1", needs_key: bool = False,
    to: tuple[str, int] | None = None,
) -> AsyncIterator[Running]:
    """An interceptor in `mode`, listening at `host` (the kind ``local:…`` listens nowhere). It leads `to` the front."""
    tunnels = Tunnels(HOSTS, authenticate=lambda key: KEYS.authenticate(key, time.time()), needs_key=needs_key)
    front = Front(tunnels)
    app = web.Application(middlewares=[error_middleware, tunnels.guard()])
    app.router.add_route("*", "/{path:.*}", front.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    front.address = runner.addresses[0][:2]
    port, metrics = free_port(), Metrics()
    modes = [split_mode(mode if ":" in mode else f"{mode}@{host}:{port}")]
    interceptor = Interceptor(directory=directory, modes=modes, tunnels=tunnels, metrics=metrics)
    await interceptor.start(to or front.address)
    running = Running(port, interceptor, metrics, front)
    try:
        yield running
    finally:
        for writer in running.writers:
            writer.transport.abort()
        await interceptor.close()
        await runner.cleanup()


def clean(**env: str) -> dict[str, str]:
    """This process's environment without proxies, and `env`."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | env


async def run_child(code: str, **env: str) -> tuple[int, str, str]:
    """A Python program of its own with nothing of ours but `env`."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=clean(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def get(connection: Connection, target: str, host: str, **headers: str) -> tuple[int, Any]:
    """One GET over an open connection: its status and its JSON."""
    reader, writer = connection
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))
