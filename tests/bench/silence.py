"""The time for which a client of each dialect hears nothing, while its engine says nothing but comments.

Four streams at once, one of each dialect, over the real front. In the middle of its answer the engine says nothing for
40 s but a comment each 5 s. Prints the longest time without an event, and without a byte:
``python -m tests.bench.silence``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

from tests.kit import tapes
from tests.kit.record_responses import FILE
from tests.kit.tapes import PROXY
from tests.proxy.io.front import Front

COMMENTS, EVERY_S = 8, 5.0
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAID = {
    CHAT: tapes.load()["chat-tool-stream", PROXY], "/v1/completions": tapes.load()["completions-plain-stream", PROXY],
    "/v1/responses": tapes.load(FILE)["tool-stream", PROXY],
}  # fmt: skip


async def _answer(http: web.Request) -> web.StreamResponse:
    chunks = SAID[http.path].chunks if (await http.json()).get("stream") else []
    response = web.StreamResponse(status=200 if chunks else 404, headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    for place, chunk in enumerate(chunks):
        for _ in range(COMMENTS if place == 6 else 0):
            await asyncio.sleep(EVERY_S)
            await response.write(b": keep-alive\n\n")
        await response.write(chunk.encode())
    return response


async def _longest(url: str, path: str) -> tuple[float, float]:
    """The longest times without an event and without a byte."""
    said: dict[str, Any] = {"input": "?"} if path == "/v1/responses" else {"prompt": "?"}
    body = {"model": "m", "max_tokens": 99, "stream": True, "messages": [{"role": "user", "content": "?"}], **said}
    heard, events, came = time.perf_counter(), 0.0, 0.0
    at, rest = heard, b""
    async with aiohttp.ClientSession() as client, client.post(f"{url}/e/x{path}", json=body) as answer:
        async for data in answer.content.iter_any():
            now = time.perf_counter()
            at, came = now, max(came, now - at)
            *whole, rest = (rest + data).split(b"\n\n")
            if any(b"data: " in one for one in whole):
                heard, events = now, max(events, now - heard)
    return events, came


async def main() -> None:
    app = web.Application()
    app.router.add_post("/{path:.*}", _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    paths = (*SAID, MESSAGES)
    async with Front(f"http://127.0.0.1:{runner.addresses[0][1]}") as front:
        found = await asyncio.gather(*(_longest(front.url, path) for path in paths))
    for path, (events, came) in zip(paths, found, strict=True):
        sys.stdout.write(f"| `{path}` | {events:.1f} s | {came:.1f} s |\n")
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
