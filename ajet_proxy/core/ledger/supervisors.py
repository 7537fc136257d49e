"""The word of supervisors on their runs, and the ends of what these write. None of it is in the journal.

A supervisor is told apart by its name. Its ``instance`` is the word of the folder in which it keeps its runs. So two
that have one name are told apart too, and the second is refused as long as the first is heard.

Of each run the newest lines are kept: at most `MAX_LINES` of its log and of its metrics, and at most `MAX_BYTES` of
each. A place in the log is a number of bytes from its beginning. A place in the metrics is a step. A run that goes back
to a checkpoint makes steps again, and then the newer lines take the place of the older ones.

Invariant: a supervisor that is silent for `SILENT_S` is believed nothing: the state of its runs is ``unknown``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from ajet_proxy.core.ledger.events import RunWanted
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import Supervise
from ajet_sdk.runs import line_digest

SILENT_S = 10.0
FORGOTTEN_S = 3600.0
"""A silent supervisor of no run is forgotten after so long."""
MAX_LINES = 1000
MAX_BYTES = 1 << 20
MAX_LINE = 8192
"""Characters of a line of a log, which is cut."""
MAX_REASON = 1000
ALIVE = ("starting", "running", "stopping", "unknown")
"""States in which there may be a trainer."""


class Log(Struct, frozen=True):
    """Lines of a log, which stand in it from the byte ``start`` to the byte ``end``. The sender thought that we have it
    to the byte ``after``. If ``start`` is another one, what is between is left out, or the log begins anew."""

    after: int
    start: int
    end: int
    lines: tuple[str, ...]


class Report(Struct, frozen=True, kw_only=True):
    """The word of a supervisor on a run. ``starts`` is the number of the start that it is about, ``config`` the digest
    of the configuration in force. Metrics behind the step ``last`` are no more (-1: all), and ``metrics`` come in their
    place. The sender thought that our newest line has the digest ``follows``."""

    state: Literal["starting", "running", "stopping", "stopped", "waiting", "done", "failed"]
    starts: int = 0
    step: int = 0
    of: int = 0
    phase: str = ""
    config: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    log: Log | None = None
    metrics: tuple[dict[str, Any], ...] = ()
    last: int | None = None
    follows: str = ""


class Verdict(Struct, frozen=True):
    """The word of a supervisor on a configuration: its ``digest``, or what is wrong with it."""

    digest: str = ""
    error: str | None = None
    param: str | None = None


@dataclass(slots=True)
class Tail:
    """The newest of some lines, each with the place at which it ends."""

    lines: deque[tuple[int, str]] = field(default_factory=deque)
    size: int = 0
    first: int = 0
    """The place from which on there are all."""

    @property
    def end(self) -> int:
        return self.lines[-1][0] if self.lines else self.first

    def add(self, place: int, line: str) -> None:
        self.lines.append((place, line))
        self.size += len(line)
        while len(self.lines) > MAX_LINES or self.size > MAX_BYTES:
            self.first, gone = self.lines.popleft()
            self.size -= len(gone)

    def cut(self, place: int) -> None:
        """Lines behind `place` are no more."""
        while self.lines and self.lines[-1][0] > place:
            self.size -= len(self.lines.pop()[1])

    def after(self, place: int) -> Iterable[tuple[int, str]]:
        return (line for line in self.lines if line[0] > place)


@dataclass(slots=True)
class Followed:
    """The state of a run, as far as it is known."""

    report: Report | None = None
    log: Tail = field(default_factory=Tail)
    log_end: int = 0
    metrics: Tail = field(default_factory=lambda: Tail(first=-1))

    def take(self, report: Report) -> None:
        """Lines that do not go on from ours are left: the sender hears what we have, and sends them again."""
        self.report = report
        if report.log is not None and report.log.after == self.log_end:
            self._take_log(report.log)
        if report.last is not None and report.follows == self.have["line"]:
            self.metrics.cut(report.last)
            for item in report.metrics:
                self.metrics.add(item["step"], json.dumps(item))

    def _take_log(self, log: Log) -> None:
        if log.start != log.after:
            self.log = Tail(first=log.start)
        place = log.start
        for number, line in enumerate(log.lines, 1):
            place = log.end if number == len(log.lines) else place + len(line.encode()) + 1
            self.log.add(place, line[:MAX_LINE])
        self.log_end = log.end

    @property
    def have(self) -> dict[str, Any]:
        """From where on the supervisor should send lines."""
        newest = self.metrics.lines[-1][1] if self.metrics.lines else ""
        return {"log": self.log_end, "step": self.metrics.end, "line": line_digest(newest)}


@dataclass(slots=True)
class Heard:
    instance: str
    at: float


class Supervisors:
    """All that was heard since the daemon's start. ``checks`` are configurations that a supervisor should look at, and
    ``verdicts`` what it has said of them, by the check's id."""

    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}
        self.runs: dict[str, Followed] = {}
        self.checks: dict[str, tuple[str, dict[str, Any]]] = {}
        self.verdicts: dict[str, Verdict] = {}

    def alive(self, at: float) -> list[str]:
        """The names of those that are not silent."""
        return [name for name, known in self.heard.items() if at - known.at <= SILENT_S]

    def hear(self, said: Supervise, runs: Mapping[str, RunWanted], at: float) -> None:
        """Takes a report. Raises `BadRequest` for one that cannot be read, and then nothing of it counts. Raises
        `Conflict` for a second supervisor of one name."""
        known = self.heard.get(said.name)
        if known is not None and known.instance != said.instance and at - known.at <= SILENT_S:
            message = f"there is another supervisor {said.name}, with other folders: give this one another name"
            raise Conflict(message, code="supervisor_exists")
        reports = {name: _read(Report, one, f"runs.{name}") for name, one in said.runs.items()}
        verdicts = {check: _read(Verdict, one, f"verdicts.{check}") for check, one in said.verdicts.items()}
        for name, report in reports.items():
            if any(type(line.get("step")) is not int for line in report.metrics):
                raise BadRequest(f"runs.{name}: a line of metrics needs its step", param="runs")
        self.heard[said.name] = Heard(said.instance, at)
        wanted = {run.supervisor for run in runs.values()}
        for name in [name for name, one in self.heard.items() if name not in wanted and at - one.at > FORGOTTEN_S]:
            del self.heard[name]
        for name in self.runs.keys() - runs.keys():
            del self.runs[name]
        for name, report in reports.items():
            if name in runs and runs[name].supervisor == said.name:
                self.of(name).take(report)
        for check in self.checks.keys() & verdicts.keys():
            if self.checks[check][0] == said.name:
                del self.checks[check]
                self.verdicts[check] = verdicts[check]

    def of(self, run: str) -> Followed:
        return self.runs.setdefault(run, Followed())

    def told(self, name: str, runs: Mapping[str, RunWanted]) -> dict[str, Any]:
        """Answer the supervisor `name`: what is wanted of its runs, and what it should check."""
        wanted = {
            run.run: {"desired": run.desired, "config": run.keys, "digest": run.digest, "starts": run.starts}
            for run in runs.values() if run.supervisor == name
        }
        checks = {check: asked for check, (supervisor, asked) in self.checks.items() if supervisor == name}
        return {
            "runs": wanted, "have": {run: self.of(run).have for run in wanted}, "checks": checks,
            "known": line_digest(json.dumps(wanted, sort_keys=True)),
        }

    def silence(self, supervisor: str, at: float) -> str | None:
        """Why `supervisor` is believed nothing, if it is not."""
        known = self.heard.get(supervisor)
        if known is None:
            return f"supervisor {supervisor} was not heard since the daemon started"
        if at - known.at > SILENT_S:
            return f"supervisor {supervisor} was last heard {int(at - known.at)} s ago"
        return None

    def runs_now(self, run: RunWanted, at: float) -> bool:
        """Tell whether there is a trainer of `run`, or may be."""
        return str(self.actual(run, at)["state"]) in ALIVE

    def actual(self, run: RunWanted, at: float) -> dict[str, Any]:
        """Tell how `run` is, as its supervisor said; ``unknown`` if that is silent."""
        report = self.of(run.run).report
        if report is None:
            return {"state": "unknown"}
        shown = {
            "state": report.state, "starts": report.starts, "step": report.step, "of": report.of,
            "phase": report.phase[:MAX_REASON], "config": report.config, "exit_code": report.exit_code,
            "reason": report.reason and report.reason[:MAX_REASON],
        }
        return shown if self.silence(run.supervisor, at) is None else shown | {"state": "unknown"}

    def show(self, run: RunWanted, at: float) -> dict[str, Any]:
        """Show what is wanted of `run` besides its configuration, how it is, and the reason where the two differ."""
        actual = self.actual(run, at)
        return {
            "run": run.run, "supervisor": run.supervisor, "desired": run.desired, "digest": run.digest,
            "starts": run.starts, "wanted_at": run.at, "actual": actual,
            "reason": self.silence(run.supervisor, at) or difference(run, actual),
        }


def difference(run: RunWanted, actual: Mapping[str, Any]) -> str | None:
    """Why what runs is not what is wanted; None if it is."""
    state = actual["state"]
    if state == "unknown":
        return "its supervisor has said nothing of it yet"
    if run.desired == "stopped":
        return f"it is {state}: {actual['phase']}" if state in ALIVE else None
    if state not in ALIVE and state != "stopped":
        return actual["reason"] or f"it is {state}"
    if state == "stopped" or actual["starts"] != run.starts:
        return "it is about to start" if state == "stopped" else f"it is {state}, and will start anew"
    if state != "running":
        return f"it is {state}: {actual['phase']}"
    same = actual["config"] == run.digest
    return None if same else actual["reason"] or "it takes up its new configuration at its next step"


def _read(kind: Any, value: Any, name: str) -> Any:
    try:
        return convert(value, kind)
    except ValidationError as error:
        raise BadRequest(f"{name[:200]}: {error}", param=name.partition(".")[0]) from None


