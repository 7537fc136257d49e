"""The cost of several models: CPU time of the daemon for a request, with one model and with ten.

    python -m tests.bench.models [N] [ROUNDS]

Each daemon has the same canned engine, once for each model, and each model is announced. The agents ask for these in
turn. Rounds alternate, so what else the machine does concerns both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.bench import table
from tests.bench.load import Load
from tests.bench.overhead import measure
from tests.bench.rivals import CHAT, Rival, raise_limit, server
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess

AGENTS, TURNS = 40, 25


@contextmanager
def daemon(folder: Path, engine: int, models: list[str]) -> Iterator[Rival]:
    url = f"http://127.0.0.1:{engine}"
    first, *others = (f"{model}={url}" for model in models)
    with ProxyProcess(first, folder, options=[word for one in others for word in ("--upstream", one)]) as proxy:
        for model in models:
            announced = {"model": model, "version": 1}
            httpx.post(f"{proxy.url}/ajet/v1/policy", json=announced, trust_env=False).raise_for_status()
        yield Rival(f"{len(models)}", proxy.port, proxy.pid, f"/e/{{}}{CHAT}")


def main() -> None:
    most, rounds = [*map(int, sys.argv[1:]), *(10, 7)[len(sys.argv) - 1 :]]
    raise_limit()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        stack.enter_context(server("engine", engine := free_port()))
        names = {number: [f"model-{place}" for place in range(number)] for number in (1, most)}
        daemons = {n: stack.enter_context(daemon(folder / str(n), engine, some)) for n, some in names.items()}
        found: dict[int, list[float]] = {number: [] for number in names}
        for turn in range(rounds + 1):  # the first warms up and is not counted
            for number, rival in daemons.items():
                point = measure(rival, Load(AGENTS, TURNS, models=names[number]), f"{turn}")
                assert not point.errors, point.errors
                found[number].append(point.cpu)
        rows = [
            [str(number), f"{statistics.median(some[1:]):.0f}", f"{min(some[1:]):.0f} to {max(some[1:]):.0f}"]
            for number, some in found.items()
        ]
        title = f"A request, {AGENTS} at once, {rounds} rounds in turn"
        table.show(title, ["models", "CPU µs, median", "least to most"], rows)


if __name__ == "__main__":
    main()
