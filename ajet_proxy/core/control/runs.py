"""The routes of runs.

A configuration is stored only after the supervisor of its run has looked at it, for only its host knows what may run
there. So `put_run` and `change_run` say what should be checked, the caller waits for the verdict, and `granted` makes
it so. Waiting belongs to `ajet_proxy.io.control.runs`.

Invariant: nothing that a supervisor refused, and nothing that nobody checked, is ever in an event. No answer has a key
of ours in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ajet_proxy.core.control.asked import Answer, Asked
from ajet_proxy.core.identity.keys import masked
from ajet_proxy.core.ledger.events import Events, RunWanted
from ajet_proxy.core.ledger.runs import forget, known_run, want
from ajet_proxy.core.ledger.supervisors import Verdict
from ajet_sdk.errors import BadRequest, Conflict, NotReady
from ajet_sdk.limits import check_name
from ajet_sdk.runs import flat, merged, tables

MAX_PLACE = 2**62
NO_SUPERVISOR = "start `ajet-trainer serve` on the host that should train"


@dataclass(frozen=True, slots=True)
class Wish:
    """A run as a request wants it: a flat configuration, the rest, and the run as it was when this was asked."""

    run: str
    supervisor: str
    desired: str
    config: Mapping[str, Any]
    restart: bool
    known: RunWanted | None

    @property
    def unchecked(self) -> bool:
        """True for a configuration that was never checked."""
        return self.known is None or dict(self.config) != self.known.keys


def put_run(asked: Asked) -> Wish:
    """The wish of a ``PUT``. Raises `NotReady` if it needs a check and nobody can."""
    run, body = check_name(asked.id), asked.body
    known = asked.state.runs.get(run)
    supervisor, config = _supervisor(asked, known), merged({}, flat(body.config))
    return _possible(asked, Wish(run, supervisor, body.desired, config, body.restart, known))


def change_run(asked: Asked) -> Wish:
    """The wish of a ``PATCH``. Raises as `put_run` does."""
    known, body = known_run(asked.state.runs, check_name(asked.id)), asked.body
    desired = known.desired if body.desired is None else body.desired
    config = known.keys if body.config is None else merged(known.keys, flat(body.config))
    return _possible(asked, Wish(known.run, known.supervisor, desired, config, body.restart, known))


def _possible(asked: Asked, wish: Wish) -> Wish:
    """`wish`, if it may be granted."""
    _events(asked, wish, "")  # before anybody is asked
    if wish.unchecked and (said := asked.supervisors.silence(wish.supervisor, asked.at)) is not None:
        raise NotReady(f"{said}, and it checks every configuration: {NO_SUPERVISOR}", code="no_supervisor")
    return wish


def _supervisor(asked: Asked, known: RunWanted | None) -> str:
    """The supervisor that a ``PUT`` names, or the only one that is heard."""
    named: str | None = asked.body.supervisor
    if known is not None:
        if named not in (None, known.supervisor):
            said = f"run {known.run} belongs to supervisor {known.supervisor}: forget the run first"
            raise Conflict(said, code="other_supervisor", param="supervisor")
        return known.supervisor
    if named is not None:
        return named
    alive = asked.supervisors.alive(asked.at)
    if not alive:
        raise NotReady(f"no supervisor is heard: {NO_SUPERVISOR}", code="no_supervisor")
    if len(alive) > 1:
        raise BadRequest(f"say which supervisor: {', '.join(sorted(alive))}", param="supervisor")
    return alive[0]


def granted(asked: Asked, wish: Wish, verdict: Verdict | None) -> Answer:
    """The answer to `wish`, whose configuration got the `verdict`; None if it was checked before."""
    if verdict is not None and verdict.error is not None:
        raise BadRequest(masked(verdict.error), code="config_refused", param=verdict.param)
    if asked.state.runs.get(wish.run) is not wish.known:
        raise Conflict(f"run {wish.run} was changed by somebody else: look at it again", code="run_changed")
    digest = wish.known.digest if verdict is None and wish.known is not None else (verdict or Verdict()).digest
    return Answer(lambda: _show(asked, wish.run), _events(asked, wish, digest))


def _events(asked: Asked, wish: Wish, digest: str) -> Events:
    return want(
        asked.state.runs, wish.run, supervisor=wish.supervisor, desired=wish.desired, config=wish.config,
        digest=digest, restart=wish.restart, at=asked.state.time(asked.at),
    )


def list_runs(asked: Asked) -> Answer:
    heard = {
        name: {"heard_s": max(0.0, asked.at - known.at), "silent": name not in asked.supervisors.alive(asked.at)}
        for name, known in asked.supervisors.heard.items()
    }

    def shown() -> dict[str, Any]:
        now = [(run, _actual(asked, run)) for run in asked.state.runs.values()]
        return {"runs": (actual | {"config": tables(run.keys)} for run, actual in now), "supervisors": heard}

    return Answer(shown)


def get_run(asked: Asked) -> Answer:
    run = known_run(asked.state.runs, asked.id).run
    return Answer(lambda: _show(asked, run))


def _show(asked: Asked, run: str) -> dict[str, Any]:
    known = asked.state.runs[run]
    return _actual(asked, known) | {"config": tables(known.keys)}


def _actual(asked: Asked, run: RunWanted) -> dict[str, Any]:
    """Everything to show of `run` but its configuration, which is no small work to read."""
    shown = asked.supervisors.show(run, asked.at)
    actual = shown["actual"]
    if actual.get("reason"):
        shown["actual"] = actual | {"reason": masked(actual["reason"])}
    return shown | {"reason": shown["reason"] and masked(shown["reason"])}


def run_metrics(asked: Asked) -> Answer:
    return _lines(asked, is_log=False)


def run_log(asked: Asked) -> Answer:
    return _lines(asked, is_log=True)


def _lines(asked: Asked, *, is_log: bool) -> Answer:
    followed = asked.supervisors.of(known_run(asked.state.runs, asked.id).run)
    tail, least = (followed.log, 0) if is_log else (followed.metrics, -1)
    after = asked.number("after", least, -1, MAX_PLACE)
    found = list(tail.after(after))
    lines = [masked(line) if is_log else json.loads(line) for _, line in found]
    end = min(after, tail.end) if tail.lines else after  # a daemon that starts will hear what there was
    shown = {"lines": lines, "next": found[-1][0] if found else end, "first": tail.first}
    return Answer(lambda: shown)


def forget_run(asked: Asked) -> Answer:
    known = known_run(asked.state.runs, asked.id)
    silent = asked.supervisors.silence(known.supervisor, asked.at) is not None
    runs_now = asked.supervisors.runs_now(known, asked.at) and not (silent and asked.claims.scope == "admin")
    events = forget(asked.state.runs, asked.id, runs_now=runs_now, at=asked.state.time(asked.at))
    return Answer(lambda: {"run": asked.id}, events)


def supervise(asked: Asked) -> Answer:
    note = partial(asked.supervisors.hear, asked.body, asked.state.runs, asked.at)
    return Answer(lambda: asked.supervisors.told(asked.body.name, asked.state.runs), note=note)
