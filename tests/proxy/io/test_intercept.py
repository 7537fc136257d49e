"""Interception: an unmodified client that believes it talks to a provider, and everyone else left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from ajet_proxy.io.intercept import Interceptor
from ajet_proxy.io.metrics import Metrics

OPENAI_AGENT = """
import openai
client = openai.OpenAI()
messages = [{"role": "user", "content": "Say hi"}]
whole = client.chat.completions.create(model="m", messages=messages)
chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(client.base_url, whole.choices[0].message.content, text)
"""


@dataclass
class Front:
    """Stands in for the HTTP front: notes what reaches it and answers like an engine."""

    seen: list[tuple[str, str, str]] = field(default_factory=list)
    address: tuple[str, int] = ("", 0)

    async def answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        self.seen.append((http.method, http.path, http.headers["Host"]))
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


@contextlib.asynccontextmanager
async def front() -> AsyncIterator[Front]:
    stand_in = Front()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stand_in.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stand_in.address = runner.addresses[0][:2]
    yield stand_in
    await runner.cleanup()


@dataclass
class Running:
    url: str
    interceptor: Interceptor
    metrics: Metrics
    front: Front


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with front() as stand_in:
        metrics = Metrics()
        interceptor = Interceptor(directory=tmp_path / "ca", hosts=("api.openai.com", "localhost"), metrics=metrics)
        host, port = await interceptor.start(("127.0.0.1", 0), stand_in.address)
        yield Running(f"http://{host}:{port}", interceptor, metrics, stand_in)
        await interceptor.stop()


async def run_child(code: str, **env: str) -> tuple[int, str, str]:
    """A Python program of its own with nothing of ours but `env`."""
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=clean | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_the_unmodified_openai_client_reaches_the_front(running: Running) -> None:
    code, out, err = await run_child(
        OPENAI_AGENT, HTTPS_PROXY=running.url, SSL_CERT_FILE=str(running.interceptor.bundle), OPENAI_API_KEY="sk-x"
    )
    assert code == 0, err
    assert out.split() == ["https://api.openai.com/v1/", "hi", "hi"]
    assert running.front.seen == [("POST", "/v1/chat/completions", "api.openai.com")] * 2
    assert 'kind="captured"' in running.metrics.render()


async def test_a_client_that_does_not_trust_our_ca_sends_nothing(running: Running) -> None:
    code, _, err = await run_child(
        "import openai; openai.OpenAI(max_retries=0).models.list()", HTTPS_PROXY=running.url, OPENAI_API_KEY="sk-x"
    )
    assert code != 0
    assert "CERTIFICATE_VERIFY_FAILED" in err
    assert running.front.seen == []


async def tunnel(proxy: str, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the proxy has agreed to reach `target`."""
    host, port = proxy.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    status = await reader.readuntil(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200"), status
    return reader, writer


async def test_any_other_host_is_tunnelled_unread(running: Running) -> None:
    got = asyncio.get_running_loop().create_future()

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.set_result(await reader.readexactly(4))
        writer.write(b"pong")
        writer.close()

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    async with server:
        reader, writer = await tunnel(running.url, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        writer.write(b"\x16\x03\x01\x00")
        assert await got == b"\x16\x03\x01\x00"
        assert await reader.readexactly(4) == b"pong"
        writer.close()
    assert running.front.seen == []
    assert 'kind="tunnelled"' in running.metrics.render()


async def test_plain_http_to_a_listed_host_inside_a_tunnel_reaches_the_front_too(running: Running) -> None:
    reader, writer = await tunnel(running.url, "localhost:80")
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert running.front.seen == [("GET", "/v1/models", "localhost")]


async def test_a_client_that_leaves_closes_the_connection_to_the_front(running: Running) -> None:
    context = ssl.create_default_context(cafile=str(running.interceptor.bundle))
    left = asyncio.Event()

    async def wait(http: web.Request) -> web.StreamResponse:
        try:
            await asyncio.sleep(30)
        finally:
            left.set()
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/wait", wait)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    other = Interceptor(directory=running.interceptor.directory, hosts=("localhost",), metrics=running.metrics)
    host, port = await other.start(("127.0.0.1", 0), runner.addresses[0][:2])
    _, writer = await tunnel(f"http://{host}:{port}", "localhost:443")
    await writer.start_tls(context, server_hostname="localhost")
    writer.write(b"GET /v1/wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.sleep(0.2)
    assert not left.is_set()
    writer.transport.abort()
    async with asyncio.timeout(5):
        await left.wait()
    await other.stop()
    await runner.cleanup()


async def test_the_ca_is_kept_and_its_key_is_private(running: Running, tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    key = directory / "mitmproxy-ca.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    before = key.read_bytes()
    assert (directory / "mitmproxy-ca-cert.pem").read_bytes() in running.interceptor.bundle.read_bytes()
    assert b"PRIVATE KEY" not in running.interceptor.bundle.read_bytes()
    again = Interceptor(directory=directory, hosts=(), metrics=Metrics())
    await again.start(("127.0.0.1", 0), running.front.address)
    await again.stop()
    assert key.read_bytes() == before


async def test_an_address_that_is_taken_is_a_clear_error(running: Running, tmp_path: Path) -> None:
    port = int(running.url.rpartition(":")[2])
    second = Interceptor(directory=tmp_path / "b", hosts=(), metrics=Metrics())
    with pytest.raises(OSError, match=f"cannot intercept on 127.0.0.1:{port}"):
        await second.start(("127.0.0.1", port), ("127.0.0.1", 1))
