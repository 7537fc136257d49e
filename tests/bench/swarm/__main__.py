"""Proofs with real parts: clients die, lanes share, code changes, and nobody plays for nothing, while a model trains.

    .venv-engine/bin/python -m tests.bench.swarm [PART …] [--seeds N] [--steps N] [--out DIR]

Parts are ``kills``, ``lanes``, ``edits`` and ``pace``; by default all. One vLLM serves the tiny model of the tests to
all runs but those of ``pace``, each of which launches its own. A finished run is kept in ``--out`` and never repeated.
The pictures are written there.

It takes root on Linux, because each client has a network namespace of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.swarm import edits, kills, lanes, pace
from tests.bench.swarm.stage import Ran, Site, site
from tests.kit.hosts import lacking

PARTS = ("kills", "lanes", "edits", "pace")


class Runs:
    """Runs by name, each made once and kept in `out`."""

    def __init__(self, out: Path, stack: ExitStack) -> None:
        self._out, self._stack = out, stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        self._site: Site | None = None

    @property
    def site(self) -> Site:
        if self._site is None:
            self._site = self._stack.enter_context(site(self._folder))
        return self._site

    def get(self, name: str, make: Callable[[Path], Ran]) -> Ran:
        path = self._out / f"{name}.json"
        if not path.exists():
            began = time.monotonic()
            ran = make(self._folder / name)
            path.write_text(json.dumps(ran))
            sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of a run with kills")
    parser.add_argument("--out", type=Path, default=Path("runs/swarm"))
    given = parser.parse_args()
    if (why := lacking()) is not None:
        parser.error(why)
    given.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        runs = Runs(given.out, stack)
        parts: dict[str, Callable[[], bool]] = {
            "kills": lambda: killed(runs, given.seeds, given.steps, given.out),
            "lanes": lambda: lanes.report(runs.get("lanes", lambda at: lanes.run(runs.site, at)), given.out),
            "edits": lambda: edits.report(runs.get("edits", lambda at: edits.run(runs.site, at)), given.out),
            "pace": lambda: pace.report({arm: runs.get(arm, partial(pace.run, arm=arm)) for arm in pace.ARMS}),
        }
        met = [parts[part]() for part in given.parts or PARTS]
    sys.exit(not all(met))


def killed(runs: Runs, seeds: int, steps: int, out: Path) -> bool:
    """The runs with kills and those without, in turn."""
    found: dict[str, list[Ran]] = {arm: [] for arm in kills.ARMS}
    for seed in range(seeds):
        for arm in kills.ARMS if seed % 2 == 0 else reversed(kills.ARMS):
            make = partial(kills.run, arm=arm, seed=seed, steps=steps)
            found[arm].append(runs.get(f"{arm}-{seed}", lambda at, make=make: make(runs.site, at)))  # type: ignore[misc]
    return kills.report(found, out)


if __name__ == "__main__":
    main()
