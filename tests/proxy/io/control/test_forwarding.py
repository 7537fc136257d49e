"""Requests that reach a worker and are for the ledger's process: passed on whole, with what only the worker can see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from ajet_proxy.core.identity.keys import Keys
from ajet_proxy.io.control.forwarding import CERTIFICATE, PEER, SCHEME, ControlForwarding, forwarded
from ajet_proxy.io.http.aiohttp_internals import Runner
from ajet_proxy.io.http.errors import error_middleware
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.routes import ROUTES
from tests.proxy.io.front import until


class Ledger:
    """Stands for the ledger's process."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.app = web.Application(middlewares=[forwarded])
        self.app.router.add_route("*", "/metrics", self.say)
        self.app.router.add_route("*", "/ajet/say", self.say)
        self.app.router.add_get("/ajet/events", self.events)

    async def say(self, http: web.Request) -> web.Response:
        ours = [name for name in (PEER, SCHEME, CERTIFICATE) if name in http.headers]
        return web.json_response({
            "remote": http.remote, "scheme": http.scheme, "host": http.host, "path": http.raw_path, "ours": ours,
            "method": http.method, "key": http.headers.get("Authorization"), "body": (await http.read()).decode(),
        })  # fmt: skip

    async def events(self, http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        await answer.write(b"data: first\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return answer


@contextlib.asynccontextmanager
async def relay(path: Path, ledger: Ledger | None, secret: str | None = None) -> AsyncIterator[str]:
    """The URL of a worker that relays to `ledger`."""
    worker = web.Application(middlewares=[error_middleware])
    keys = Keys(b"k" * 32, admin_secret=secret)
    budget = MemoryBudget(Metrics())
    ControlForwarding(str(path), keys=keys, clock=Clock(), max_body=1000, budget=budget).add_routes(worker)
    runners = [Runner(worker, handler_cancellation=True, shutdown_timeout=0.1)]
    await runners[0].setup()
    await web.TCPSite(runners[0], "127.0.0.1", 0).start()
    if ledger is not None:
        runners.append(Runner(ledger.app, handler_cancellation=True, shutdown_timeout=0.1))
        await runners[1].setup()
        await web.UnixSite(runners[1], str(path)).start()
    try:
        host, port = runners[0].addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        for runner in runners:
            await runner.cleanup()


@pytest.mark.parametrize("method", sorted({route.method for route in ROUTES}))
async def test_the_ledgers_process_sees_the_request_as_its_client_made_it(tmp_path: Path, method: str) -> None:
    forged = {PEER: "10.0.0.1", SCHEME: "https", CERTIFICATE: "CN=trainer", "Authorization": "Bearer k"}
    async with (
        relay(tmp_path / "s", Ledger()) as url, aiohttp.ClientSession() as session,
        session.request(method, f"{url}/ajet/say?a=%20b&c", data=b"{}", headers=forged) as answer,
    ):
        told = await answer.json()
    assert told == {
        "remote": "127.0.0.1", "scheme": "http", "host": url.removeprefix("http://"), "path": "/ajet/say?a=%20b&c",
        "ours": [], "method": method, "key": "Bearer k", "body": "{}",
    }  # fmt: skip


async def test_a_request_line_with_the_whole_address_means_its_path(tmp_path: Path) -> None:
    async with relay(tmp_path / "s", Ledger()) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET http://a.name/ajet/say?a=%20b HTTP/1.1\r\nHost: a.name\r\n\r\n")
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 200") and b'"/ajet/say?a=%20b"' in answer
        writer.close()


async def test_without_a_key_a_body_is_refused_and_the_rest_is_for_the_ledgers_process(tmp_path: Path) -> None:
    async with relay(tmp_path / "s", Ledger(), "a secret") as url, aiohttp.ClientSession() as session:
        for key, statuses in (("no secret", (401, 200)), ("a secret", (200, 200))):
            for body, status in zip((b"{}", None), statuses, strict=True):
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(f"{url}/ajet/say", data=body, headers=headers) as answer:
                    assert answer.status == status


async def test_a_stream_leaves_as_it_comes_and_ends_with_its_reader(tmp_path: Path) -> None:
    ledger = Ledger()
    async with relay(tmp_path / "s", ledger) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/ajet/events") as answer:
            assert await answer.content.readany() == b"data: first\n\n"
            assert not ledger.left.is_set()
        await until(ledger.left.is_set)


async def test_limits_hold_and_a_ledger_that_is_going_is_not_ready(tmp_path: Path) -> None:
    async with relay(tmp_path / "s", None) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 503 and answer.headers["Retry-After"]
        async with session.post(f"{url}/ajet/say", data=b"x" * 1001) as answer:
            assert answer.status == 413
