"""Requests sent in the very moment in which the engine closes the idle connection they are written to.

    python -m tests.bench.idle_close [REQUESTS]

Each of a few lanes is a model with an engine of its own, so that the proxy has one connection for it, which the engine
closes after `IDLE_S`, by turns in peace and with a reset. A lane aims by itself: a request that still got the old
connection makes the next pause longer, one that needed a new connection makes it shorter. Wanted: no error, no request
answered twice, every body whole; that some requests were sent twice shows that the moment was met.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import load, table
from tests.bench.servers import canned, post, read_request
from tests.kit.proxy_process import PROXY, ProxyProcess

LANES, IDLE_S, STEP_S = 16, 0.08, 0.0005
FILLER = "word " * 2000
METRIC = "ajet_upstream_retries_total"


@dataclass(slots=True)
class Lane:
    """An engine and what it saw; `fresh`: the last answer went out on a connection that was new."""

    port: int = 0
    connections: int = 0
    fresh: bool = False
    answered: Counter[int] = field(default_factory=Counter)
    cut: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number, fresh = self.connections, True
        try:
            while True:
                async with asyncio.timeout(60 if fresh else IDLE_S):
                    head, body = await read_request(reader)
                if not head:
                    break
                if b"/chat/completions " in head.partition(b"\r\n")[0]:
                    self._answer(body, writer)
                else:  # the proxy looks at its engine
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                self.fresh, fresh = fresh, False
        except TimeoutError:
            if number % 2:
                writer.transport.abort()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.cut += 1
        finally:
            writer.close()

    def _answer(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(body)
        number, filler = asked["messages"][0]["content"].split(":")
        self.cut += filler != FILLER
        self.answered[int(number)] += 1
        writer.write(canned()[asked["stream"]])


@dataclass(slots=True)
class Outcome:
    requests: int
    errors: list[str]
    twice: int
    lost: int
    cut: int
    retries: int
    fresh: int

    @property
    def good(self) -> bool:
        return not (self.errors or self.twice or self.lost or self.cut)


async def ask(lane: Lane, name: str, port: int, requests: int, errors: list[str]) -> int:
    """Sends `requests` one after another, each when the engine is about to close; how many needed a new connection."""
    pause, fresh = IDLE_S, 0
    way: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    for number in range(requests):
        body = {"model": name, "stream": number % 2 == 1,
                "messages": [{"role": "user", "content": f"{number}:{FILLER}"}]}  # fmt: skip
        try:
            if way is None:
                way = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
            way[1].write(post(f"/e/{name}-{number // 50}/v1/chat/completions", body))
            await load.read_answer(way[0])
        except (RuntimeError, OSError, EOFError) as error:
            errors.append(f"{name} {number}: {error!r}")
            way = None
        fresh += lane.fresh
        pause = max(0.0, pause - STEP_S if lane.fresh else pause + STEP_S)
        await asyncio.sleep(pause)
    if way is not None:
        way[1].close()
    return fresh


async def run(requests: int, folder: Path, program: Path = PROXY) -> Outcome:
    """`program` is the proxy's."""
    lanes = {f"lane{number}": Lane() for number in range(LANES)}
    servers = [await asyncio.start_server(lane.serve, "127.0.0.1", 0) for lane in lanes.values()]
    for lane, server in zip(lanes.values(), servers, strict=True):
        lane.port = server.sockets[0].getsockname()[1]
    upstreams = [f"--upstream={name}=http://127.0.0.1:{lane.port}" for name, lane in lanes.items()]
    errors: list[str] = []
    proxy = ProxyProcess(None, folder / "data", options=upstreams, program=program)
    await asyncio.to_thread(proxy.start)
    try:
        each = -(-requests // LANES)
        fresh = await asyncio.gather(*(ask(lane, name, proxy.port, each, errors) for name, lane in lanes.items()))
        metrics = await asyncio.to_thread(_metrics, proxy.url)
    finally:
        await asyncio.to_thread(proxy.stop)
        for server in servers:
            server.close()
    retries = sum(int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith(METRIC))
    times = [times for lane in lanes.values() for times in lane.answered.values()]
    return Outcome(
        requests=each * LANES, errors=errors, twice=sum(n > 1 for n in times), lost=each * LANES - len(times),
        cut=sum(lane.cut for lane in lanes.values()), retries=retries, fresh=sum(fresh),
    )  # fmt: skip


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=300) as answer:
        return str(answer.read().decode())


def main() -> None:
    requests = int(sys.argv[1]) if sys.argv[1:] else 10_000
    with tempfile.TemporaryDirectory(prefix="ajet-bench-") as folder:
        found = asyncio.run(run(requests, Path(folder)))
    head = ["requests", "errors", "answered twice", "lost", "bodies cut", "sent again", "needed a new connection"]
    row = [found.requests, len(found.errors), found.twice, found.lost, found.cut, found.retries, found.fresh]
    table.show("Requests timed at the engine's idle close", head, [[f"{value:,}" for value in row]])
    for error in found.errors[:5]:
        sys.stdout.write(f"{error}\n")
    if not found.good or not found.retries:
        raise SystemExit("not met" if found.retries else "no request met the moment: nothing was shown")


if __name__ == "__main__":
    main()
