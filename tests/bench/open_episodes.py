"""The cost of a long episode while it is open: what others wait for while it is looked at, and the memory of its turns.

    python -m tests.bench.open_episodes [--episodes 64] [--pollers 16] [--seconds 20] [--turns 1000]

Goal: while 64 open episodes of 50,000 tokens are asked for again and again by 16 pollers, without tokens, a request of
somebody else waits under 5 ms in the median, and 50 ms at most. After one episode of 1,000 turns the daemon holds less
than 300 MB.

The episodes are written as a journal, which the daemon reads at its start. Each has 100 turns. The other's request is
a heartbeat of an episode of its own; beside it stands what it waits for while nobody looks. A turn of the long episode
adds 100 tokens to its history.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from ajet_proxy.io.storage.limits import resident_bytes
from tests.bench import table
from tests.kit.histories import encoded, write_segments
from tests.kit.ledger_rig import LedgerRig
from tests.kit.proxy_process import ProxyProcess
from tests.kit.stub_process import stub_process

TURNS, TOKENS = 100, 500
SETTLED_S = 3.0
"""After its start the daemon compacts what it has read; that is not what is measured here."""


def write_journal(data: Path, episodes: int) -> list[str]:
    """A journal of so many open episodes; their names."""
    rig, names = LedgerRig(), []
    for number in range(episodes):
        names.append(name := rig.open(task="t", idle_timeout=1e9))
        text: tuple[int, ...] = ()
        for turn in range(TURNS):
            text += tuple((number + turn + at) % 30_000 for at in range(TOKENS // 2))
            sampled = tuple((number * turn + at) % 30_000 for at in range(TOKENS // 2))
            rig.call(name, text, sampled)
            text += sampled
    records = encoded(rig.events)
    write_segments(data, records, [len(records)])
    return names


@contextmanager
def polled(url: str, names: list[str], pollers: int) -> Iterator[list[int]]:
    """Within, the episodes are looked at by so many at once; how many looks each poller has had."""
    over, looks = threading.Event(), [0] * pollers

    def poll(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as http:
            for name in itertools.cycle(names[number:] + names[:number]):
                if over.is_set():
                    return
                http.get(f"/ajet/v1/episodes/{name}").raise_for_status()
                looks[number] += 1

    threads = [threading.Thread(target=poll, args=(number,)) for number in range(pollers)]
    for thread in threads:
        thread.start()
    try:
        yield looks
    finally:
        over.set()
        for thread in threads:
            thread.join()


def waits(http: httpx.Client, seconds: float) -> list[float]:
    """Milliseconds of each heartbeat, one every 20 ms."""
    opened = http.post("/ajet/v1/episodes", json={"task": "mine"}).raise_for_status().json()["episode"]
    found, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        http.post(f"/ajet/v1/episodes/{opened}/heartbeat", json={}).raise_for_status()
        found.append((time.monotonic() - began) * 1000)
        time.sleep(0.02)
    return found


def memory(http: httpx.Client, pid: int, turns: int) -> tuple[float, float]:
    """MB that the daemon holds before and after an episode of so many turns."""
    before, said = resident_bytes(str(pid)), []
    for turn in range(turns):
        said.append({"role": "user", "content": f"turn {turn}: " + "word " * 50})
        body = {"model": "stub", "messages": said, "max_tokens": 50}
        answer = http.post("/e/long/v1/chat/completions", json=body).raise_for_status().json()
        said.append(answer["choices"][0]["message"])
    return before / 1e6, resident_bytes(str(pid)) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(prog="open_episodes", description=__doc__)
    for name, usual in (("episodes", 64), ("pollers", 16), ("seconds", 20), ("turns", 1000)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        names = write_journal(folder / "data", args.episodes)
        stub = stack.enter_context(stub_process())
        proxy = stack.enter_context(ProxyProcess(stub, folder / "data"))
        http = stack.enter_context(httpx.Client(base_url=proxy.url, timeout=120.0, trust_env=False))
        time.sleep(SETTLED_S)
        rows = []
        for who, pollers in (("nobody looks", 0), (f"{args.pollers} pollers", args.pollers)):
            began = time.monotonic()
            with polled(proxy.url, names, pollers) as looks:
                found = waits(http, args.seconds)
            rate = sum(looks) / (time.monotonic() - began)
            rows.append([who, f"{rate:.0f}", f"{statistics.median(found):.1f}",
                         f"{statistics.quantiles(found, n=100)[98]:.1f}", f"{max(found):.1f}"])  # fmt: skip
        head = ["", "looks a second", "median wait ms", "99 %", "most"]
        table.show(f"Looking at {args.episodes} open episodes of {TURNS * TOKENS} tokens", head, rows)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        stub = stack.enter_context(stub_process())
        proxy = stack.enter_context(ProxyProcess(stub, folder / "data"))
        http = stack.enter_context(httpx.Client(base_url=proxy.url, timeout=120.0, trust_env=False))
        before, after = memory(http, proxy.pid, args.turns)
        sys.stdout.write(f"\nmemory: {before:.0f} MB before, {after:.0f} MB after {args.turns} turns\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
