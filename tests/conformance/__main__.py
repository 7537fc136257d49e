"""Runs another project's API tests directly and through the proxy, and tells which tests came out differently.

    python -m tests.conformance CHECKOUT [--engine vllm|stub|URL] [pytest's options]

Five runs: directly, directly again (what differs between the two is flaky), through the proxy, through the proxy with
the episode in the path, and through a proxy that sends no ids of its own. Exits 1 when a test came out differently or
the engine received other requests, 2 on bad usage. What is the same in all runs, failures included, is no matter here:
the engine, not the suite's author, decides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import table
from tests.conformance import compare
from tests.conformance.engines import Engine, EngineFailed
from tests.conformance.suites import MOCKED, Suite, SuiteFailed, recognise
from tests.kit.proxy_process import ProxyFailed, ProxyProcess

LIMIT_S = 3600


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a suite: its tests' outcomes, what the engine received, and how long it took."""

    name: str
    outcomes: compare.Outcomes
    received: Counter[str]
    seconds: float


def run(suite: Suite, name: str, root: str, engine: Engine, options: Sequence[str]) -> Run:
    """Run the tests of `suite` against `root`."""
    report = suite.folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    model = "" if suite.name in MOCKED else engine.model()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("AJET_", "PYTHON", "VIRTUAL_ENV"))}
    environment = {**clean, **suite.addresses(root, model), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "127.0.0.1"}
    command = [str(suite.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *suite.tests]
    mark, began = engine.mark, time.monotonic()
    with (suite.folder / f"{name}.log").open("wb") as log:
        subprocess.run(
            [*command, *options], cwd=suite.checkout, env=environment, stdout=log, stderr=log, timeout=LIMIT_S,
            check=False,
        )
    seconds = time.monotonic() - began
    outcomes = compare.read(report) if report.exists() else {}
    if not outcomes:
        raise SuiteFailed(f"the suite ran no test; it wrote {suite.folder / name}.log")
    return Run(name, outcomes, compare.asked(engine.received(mark)), seconds)


def conformance(suite: Suite, engine: Engine, options: Sequence[str]) -> bool:
    """All runs of `suite` and what they show; whether all is the same."""
    direct = run(suite, "direct", engine.url, engine, options)
    again = run(suite, "direct-again", engine.url, engine, options)
    with tempfile.TemporaryDirectory() as data:
        with ProxyProcess(engine.url, Path(data) / "journal") as proxy:
            proxied = run(suite, "proxied", proxy.url, engine, options)
            by_path = run(suite, "by-path", f"{proxy.url}/e/conformance", engine, options)
            calls, said = captured(proxy), proxy.errors()
        with ProxyProcess(engine.url, Path(data) / "plain", options=("--continuity", "off")) as proxy:
            plain = run(suite, "continuity-off", proxy.url, engine, options)
            calls, said = calls + captured(proxy), said + proxy.errors()
    same = judge(suite, direct, again, (proxied, by_path, plain))
    say(", ".join(f"{number:,} {state}" for state, number in calls.items()) + " calls")
    if said:
        say(f"the proxy wrote to its standard error:\n{said}")
    # a mock gives no token ids, and a suite gives its names to many conversations
    return same and all(line.startswith(("INFO ", "WARNING ", "page ")) for line in said.splitlines() if line)


def captured(proxy: ProxyProcess) -> Counter[str]:
    """The number of calls of `proxy` that are complete, lost and running."""
    with urllib.request.urlopen(f"{proxy.url}/ajet/v1/status", timeout=300) as answer:
        calls = json.load(answer)["calls"]
    return Counter({state: calls[state] for state in ("complete", "lost", "running")})


def judge(suite: Suite, direct: Run, again: Run, through: Sequence[Run]) -> bool:
    """Show all runs, and whether those `through` the proxy are like the direct ones."""
    flaky = compare.differences(direct.outcomes, again.outcomes)
    steady = direct.received == again.received
    rows, faults = [], []
    for one in (direct, again, *through):
        differing = compare.differences(direct.outcomes, one.outcomes, flaky)
        unlike = compare.unlike(direct.received, one.received) if steady else []
        faults += [f"{one.name}: {fault}" for fault in (*differing.values(), *unlike)]
        count = compare.counts(one.outcomes)
        numbers = (count[compare.PASSED], count[compare.FAILED] + count[compare.ERROR], count[compare.SKIPPED],
                   len(differing), sum(one.received.values()), len(unlike))  # fmt: skip
        rows.append([one.name, *(f"{number:,}" for number in numbers), f"{one.seconds:.0f}"])
    head = ["run", "passed", "failed", "skipped", "tests that differ", "requests", "requests that differ", "seconds"]
    table.show(f"{suite.name} {suite.version}, {len(direct.outcomes):,} tests", head, rows)
    for test in flaky:
        say(f"flaky, not judged: {test}")
    if not steady:
        say("the engine received not the same in both direct runs: requests are not judged")
    for fault in faults:
        say(fault)
    return not faults


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="openai-python, anthropic-sdk-python or langchain-tests")
    parser.add_argument("--engine", help="vllm, stub, a URL, or the OpenAPI description of a mock")
    known, options = parser.parse_known_args(arguments)
    try:
        suite = recognise(known.checkout)
        suite.folder.mkdir(parents=True, exist_ok=True)
        suite.build()
        with suite.engine(known.engine) as engine:
            return 0 if conformance(suite, engine, options) else 1
    except (SuiteFailed, EngineFailed, ProxyFailed) as error:
        sys.stderr.write(f"conformance: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
