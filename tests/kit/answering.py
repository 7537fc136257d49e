"""A server that gives one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def answering(path: str, status: int, **headers: str) -> AsyncIterator[str]:
    """An engine that answers so at `path`, and 404 elsewhere."""

    async def answer(http: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers)

    app = web.Application()
    app.router.add_route("*", path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
