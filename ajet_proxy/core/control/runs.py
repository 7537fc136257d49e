"""The routes of runs, as functions of the request, of what is wanted, and of what supervisors say.

A configuration is stored only after the supervisor of its run has looked at it, for only its host knows what may run
there. So `asked` says what should be checked, the caller waits for the verdict, and `decide` makes it so. Waiting
belongs to `ajet_proxy.io.control.runs`.

Invariant: nothing that a supervisor refused, and nothing that nobody checked, is ever in an event. No answer has a key
of ours in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ajet_proxy.core.control.api import Answer, Request
from ajet_proxy.core.identity.keys import masked
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.runs import WantedRun, check_desired, forget, known_run, want
from ajet_proxy.core.ledger.supervisors import Supervisors, Verdict
from ajet_sdk.errors import BadRequest, Conflict, NotReady
from ajet_sdk.routes import Supervise, parse, route
from ajet_sdk.runs import check_name, flat, merged

RUN_ROUTES = (
    "list_runs", "put_run", "change_run", "get_run", "forget_run", "run_metrics", "run_log", "supervise",
)  # fmt: skip
MAX_PLACE = 2**62
NO_SUPERVISOR = "start `ajet-trainer serve` on the host that should train"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants of a run: a flat configuration, the rest, and the run as it was when this was asked."""

    run: str
    supervisor: str
    desired: str
    config: Mapping[str, Any]
    restart: bool
    known: WantedRun | None

    @property
    def unchecked(self) -> bool:
        """Whether this configuration was never checked."""
        return self.known is None or dict(self.config) != self.known.keys


class Runs:
    """The routes of `RUN_ROUTES` over the ledger of `commands`."""

    def __init__(self, commands: Commands) -> None:
        self.state = commands.state
        self.supervisors = Supervisors()

    def asked(self, request: Request, at: float) -> Wish:
        """What a ``PUT`` or ``PATCH`` asks for. Raises `NotReady` if it needs a check and nobody can."""
        run = check_name(request.id)
        body: Any = parse(route(request.route).body, request.body)  # type: ignore[arg-type]
        known = self.state.runs.get(run)
        if request.route == "change_run":
            known = known_run(self.state.runs, run)
            desired = known.desired if body.desired is None else body.desired
            config = known.keys if body.config is None else merged(known.keys, flat(body.config))
            wish = Wish(run, known.supervisor, desired, config, body.restart, known)
        else:
            supervisor = self._supervisor(body.supervisor, known, at)
            wish = Wish(run, supervisor, body.desired, merged({}, flat(body.config)), body.restart, known)
        check_desired(wish.desired)
        self._events(wish, "", at)  # before anybody is asked
        if wish.unchecked and (said := self.supervisors.silence(wish.supervisor, at)) is not None:
            raise NotReady(f"{said}, and it checks every configuration: {NO_SUPERVISOR}", code="no_supervisor")
        return wish

    def _supervisor(self, named: str | None, known: WantedRun | None, at: float) -> str:
        if known is not None:
            if named not in (None, known.supervisor):
                said = f"run {known.run} belongs to supervisor {known.supervisor}: forget the run first"
                raise Conflict(said, code="other_supervisor", param="supervisor")
            return known.supervisor
        if named is not None:
            return check_name(named, "supervisor")
        alive = self.supervisors.alive(at)
        if not alive:
            raise NotReady(f"no supervisor is heard: {NO_SUPERVISOR}", code="no_supervisor")
        if len(alive) > 1:
            raise BadRequest(f"say which supervisor: {', '.join(sorted(alive))}", param="supervisor")
        return alive[0]

    def decide(self, wish: Wish, verdict: Verdict | None, at: float) -> Answer:
        """The answer to `wish`, whose configuration got the `verdict`; None if it was checked before."""
        if verdict is not None and verdict.error is not None:
            raise BadRequest(masked(verdict.error), code="config_refused", param=verdict.param)
        if self.state.runs.get(wish.run) is not wish.known:
            raise Conflict(f"run {wish.run} was changed by somebody else: look at it again", code="run_changed")
        digest = wish.known.digest if verdict is None and wish.known is not None else (verdict or Verdict()).digest
        return Answer(lambda: self._show(wish.run, at), self._events(wish, digest, at))

    def _events(self, wish: Wish, digest: str, at: float) -> Any:
        return want(
            self.state.runs, wish.run, supervisor=wish.supervisor, desired=wish.desired, config=wish.config,
            digest=digest, restart=wish.restart, at=max(at, self.state.now),
        )

    def handle(self, request: Request, at: float) -> Answer:
        """The answer to a request that needs no verdict."""
        answers: dict[str, Callable[[], Answer]] = {
            "list_runs": lambda: Answer(lambda: self._list(at)),
            "get_run": lambda: self._of(request, lambda run: self._show(run.run, at)),
            "run_metrics": lambda: self._of(request, lambda run: self._lines(request, run)),
            "run_log": lambda: self._of(request, lambda run: self._lines(request, run)),
            "forget_run": lambda: self._forget(request, at),
            "supervise": lambda: self._hear(request, at),
        }
        return answers[request.route]()

    def _of(self, request: Request, show: Callable[[WantedRun], dict[str, Any]]) -> Answer:
        shown = show(known_run(self.state.runs, request.id))
        return Answer(lambda: shown)

    def _show(self, run: str, at: float) -> dict[str, Any]:
        shown = self.supervisors.show(self.state.runs[run], at)
        actual = shown["actual"]
        if actual.get("reason"):
            shown["actual"] = actual | {"reason": masked(actual["reason"])}
        return shown | {"reason": shown["reason"] and masked(shown["reason"])}

    def _list(self, at: float) -> dict[str, Any]:
        heard = {
            name: {"heard_s": max(0.0, at - known.at), "silent": name not in self.supervisors.alive(at)}
            for name, known in self.supervisors.heard.items()
        }
        return {"runs": [self._show(run, at) for run in self.state.runs], "supervisors": heard}

    def _lines(self, request: Request, run: WantedRun) -> dict[str, Any]:
        followed = self.supervisors.of(run.run)
        tail, least = (followed.log, 0) if request.route == "run_log" else (followed.metrics, -1)
        after = _place(request.query.get("after", str(least)))
        found = list(tail.after(after))
        lines = [masked(line) if request.route == "run_log" else json.loads(line) for _, line in found]
        end = min(after, tail.end) if tail.lines else after  # a daemon that starts will hear what there was
        return {"lines": lines, "next": found[-1][0] if found else end, "first": tail.first}

    def _forget(self, request: Request, at: float) -> Answer:
        known = known_run(self.state.runs, request.id)
        silent = self.supervisors.silence(known.supervisor, at) is not None
        runs_now = self.supervisors.runs_now(known, at) and not (silent and request.claims.scope == "admin")
        events = forget(self.state.runs, request.id, runs_now=runs_now, at=max(at, self.state.now))
        return Answer(lambda: {"run": request.id}, events)

    def _hear(self, request: Request, at: float) -> Answer:
        said = parse(Supervise, request.body)
        self.supervisors.hear(said, self.state.runs, at)
        return Answer(lambda: self.supervisors.told(said.name, self.state.runs))


def _place(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and int(digits) < MAX_PLACE):
        raise BadRequest("after must be an integer", param="after")
    return int(text)
