"""Agents that stream one chat call after another and note when each piece of an answer came, until standard input ends.

    python -m tests.bench.streamers PORT AGENTS TOKENS MODEL

Prints one JSON line: for each agent its calls, each ``[asked, [times of events], whole]``, in seconds of the clock that
all processes share. A call is whole if it was answered 200, sampled all its tokens and ended as a stream ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from tests.bench.servers import post

Call = tuple[float, list[float], bool]


async def agent(port: int, number: int, tokens: int, model: str, over: asyncio.Event) -> list[Call]:
    calls: list[Call] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    while not over.is_set():
        content = f"agent {number} call {len(calls)}"
        said = body | {"messages": [{"role": "user", "content": content}]}
        asked = time.monotonic()
        writer.write(post(f"/e/agent-{number}-{len(calls) // 10}/v1/chat/completions", said))
        times, whole = await answer(reader)
        calls.append((asked, times, whole))
    writer.close()
    return calls


async def answer(reader: asyncio.StreamReader) -> tuple[list[float], bool]:
    """When the events of one answer came, and whether it was whole."""
    head = await reader.readuntil(b"\r\n\r\n")
    times: list[float] = []
    done = length = False
    if not head.startswith(b"HTTP/1.1 200") or b"text/event-stream" not in head.lower():
        raise RuntimeError(f"answered {head[:200]!r}")
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size)
        await reader.readline()
        times.append(time.monotonic())
        length = length or b'"finish_reason":"length"' in chunk
        done = done or b"data: [DONE]" in chunk
    await reader.readline()
    return times, done and length


async def main() -> None:
    port, agents, tokens = map(int, sys.argv[1:4])
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, over.set)
    found = await asyncio.gather(*(agent(port, number, tokens, sys.argv[4], over) for number in range(agents)))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
