"""A load generator on bare sockets: keep-alive connections that send chat requests one after another."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

END = b"\r\n0\r\n\r\n"


async def run(port: int, *, path: str, stream: bool, requests: int, connections: int) -> list[float]:
    """Sends `requests` over `connections` at once; seconds to the last byte of each. ``{}`` in `path` is its number."""
    numbers = itertools.count()
    seconds: list[float] = []
    body = json.dumps(
        {
            "model": "stub",
            "stream": stream,
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "hello " * 50}],
        },
        separators=(",", ":"),
    ).encode()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        while (number := next(numbers)) < requests:
            head = f"POST {path.format(number)} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            began = time.perf_counter()
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            await read_answer(reader)
            seconds.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))
    return seconds


async def read_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"answered {head[:200]!r}")
    if b"transfer-encoding: chunked" in head:
        await reader.readuntil(END)
    else:
        place = head.index(b"content-length:")
        await reader.readexactly(int(head[place + 15 : head.index(b"\r\n", place)]))
