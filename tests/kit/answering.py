"""Servers of a few lines, which stand in for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Connected = AbstractAsyncContextManager[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def running(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """The URL at which `app` is served."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1, **options)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(path: str, handler: Handler) -> AbstractAsyncContextManager[str]:
    """The URL of an engine whose requests at `path` are answered by `handler`; it answers 404 elsewhere."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    return running(app)


def saying(path: str, status: int, **headers: str) -> AbstractAsyncContextManager[str]:
    """The URL of an engine that answers so at `path`, and 404 elsewhere."""

    async def say(_: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers)

    return answering(path, say)


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """The URL of an engine that does `serve` with each connection, until the end of the block."""
    serving = set[asyncio.Task[None] | None]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with suppress(asyncio.CancelledError), closing(writer):
            await serve(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        tasks = [task for task in serving if task is not None and task.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)


def address(url: str) -> tuple[str, int]:
    """The host and the port of `url`."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


@asynccontextmanager
async def connected(url: str, sent: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `url` on which `sent` was written, and which is left without a word."""
    reader, writer = await asyncio.open_connection(*address(url))
    try:
        writer.write(sent)
        yield reader, writer
    finally:
        writer.transport.abort()
