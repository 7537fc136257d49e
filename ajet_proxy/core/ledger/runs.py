"""The runs that are wanted: each has a configuration, a supervisor, and should run or be stopped.

The daemon starts nothing. It remembers what is wanted, as events, and what supervisors say of it
(`ajet_proxy.core.ledger.supervisors`), in memory alone.

Invariant: ``starts`` is raised by everything that takes another start of the trainer, and by nothing else. So a
supervisor compares one number, and knows no keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ajet_proxy.core.ledger import events as ev
from ajet_sdk.errors import Conflict, NotFound
from ajet_sdk.runs import changed, restarts

MAX_RUNS = 100


class Runs(dict[str, ev.RunWanted]):
    """The runs that are wanted, by their names, each as it was wanted last."""

    KEPT = ()

    def _wanted(self, event: ev.RunWanted) -> None:
        self[event.run] = event

    def _forgotten(self, event: ev.RunForgotten) -> None:
        del self[event.run]


def known_run(runs: Mapping[str, ev.RunWanted], run: str) -> ev.RunWanted:
    """The run, or `NotFound`."""
    if run not in runs:
        raise NotFound(f"no run {run}", code="unknown_run")
    return runs[run]


def want(
    runs: Mapping[str, ev.RunWanted], run: str, *, supervisor: str, desired: str, config: Mapping[str, Any],
    digest: str, restart: bool, at: float,
) -> ev.Events:
    """`run` is wanted like this, with a flat `config`. Raises `Conflict` if that takes a `restart` of a run that is
    wanted to run, and for one run too many."""
    known = runs.get(run)
    if known is None and len(runs) >= MAX_RUNS:
        raise Conflict(f"there are {MAX_RUNS} runs already: forget one", code="too_many_runs")
    keys = [] if known is None else restarts(changed(known.keys, config))
    if known is not None and keys and not restart and known.desired == desired == "running":
        said = f"{', '.join(keys)} cannot change while run {run} runs: ask again with restart"
        raise Conflict(said, code="needs_restart", param=",".join(keys))
    begins = known is None or (desired == "running" and known.desired != "running")
    starts = (0 if known is None else known.starts) + (begins or restart or bool(keys))
    written = json.dumps(config, sort_keys=True)
    wanted = ev.RunWanted(at, run, supervisor, desired, written, digest, starts)
    return () if known is not None and replace(wanted, at=known.at) == known else (wanted,)


def forget(runs: Mapping[str, ev.RunWanted], run: str, *, runs_now: bool, at: float) -> ev.Events:
    """`run` is forgotten. Raises `Conflict` as long as it is wanted, or `runs_now`."""
    known = known_run(runs, run)
    if known.desired != "stopped" or runs_now:
        raise Conflict(f"run {run} is not stopped, or not known to be", code="run_not_stopped")
    return (ev.RunForgotten(at, run),)
