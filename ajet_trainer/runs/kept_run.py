"""One run that a supervisor keeps: each turn one move nearer to what is wanted of it, and a report of how it is.

What is known of a trainer is read from the run's folder: who holds the lock, which start that is, in which phase. So a
supervisor that was killed goes on where it was, with the trainer that went on without it.

Invariant: a trainer starts only in a folder that nobody holds (`held`). One that ended without being asked to is
started again, each time a while later, until it has made a step. One that cannot use its configuration is not started
again before something else is wanted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ajet_sdk.errors import AjetError
from ajet_sdk.settings import ConfigError, toml_of
from ajet_trainer import held
from ajet_trainer.run_folder import LOCK, PRIVATE, put, read_json
from ajet_trainer.runs.allowed import Allowed, config_of
from ajet_trainer.runs.hidden import Hidden
from ajet_trainer.runs.tails import last_line, log_after, metrics_after, phase_in

BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 300.0
LOG, CONFIG = "trainer.log", "config.toml"
METRICS = "metrics.jsonl"
PHASE, STARTED, TOLD = "phase.json", "started.json", "told.json"
TRAINING = ("training", "waiting for", "draining", "pushing", "saving", "evaluating")
"""Beginnings of phases in which a run is up."""
COMMAND = (sys.executable, "-m", "ajet_trainer.cli", "run", "--watch", "--config")
"""The program that trains; the file of its configuration stands behind it."""


@dataclass(frozen=True, slots=True)
class Host:
    """All that the runs of a host share: what may run, with which variables and `command`, what is `hidden`. The daemon
    is at `proxy`; `say` shows a line."""

    allowed: Allowed
    proxy: str
    env: Mapping[str, str]
    hidden: Hidden
    say: Callable[[str], None]
    command: tuple[str, ...] = COMMAND
    clock: Callable[[], float] = time.monotonic


@dataclass
class KeptRun:
    """The run called `name`, between two turns. ``launched`` is the number of the start that ``process`` is."""

    name: str
    host: Host
    process: subprocess.Popen[bytes] | None = None
    launched: int = 0
    log_from: int = 0
    urged: bool = False
    """Its trainer is to be asked once more to end."""
    attempts: int = 0
    retry_at: float = 0.0
    step: int = 0
    ended: dict[str, Any] = field(default_factory=dict)
    """The end of its last trainer: how, and of which start and configuration."""
    have: Mapping[str, Any] = field(default_factory=dict)
    """The part of its files that the daemon has."""
    report: dict[str, Any] = field(default_factory=dict)
    """Empty until it was looked at."""
    odd: dict[str, int] = field(default_factory=dict)
    """Of its files, the number of lines that were left out, because no report can carry them."""

    @property
    def folder(self) -> Path:
        return self.host.allowed.runs / self.name

    def pid(self) -> int | None:
        """The process that holds the folder, if there is one."""
        return held.holder(self.folder) if self.folder.is_dir() and not self.folder.is_symlink() else None

    def lives(self) -> bool:
        """True if somebody is at work in the folder, as far as that can be told."""
        with suppress(OSError, AjetError):
            if self.pid() is not None:
                return True
        return self.process is not None and self.process.poll() is None

    def lines(self) -> dict[str, Any]:
        """The lines of the run's files that the daemon lacks."""
        if not self.have or not self.report:
            return {}
        hidden = self.host.hidden
        log = log_after(self.folder / LOG, int(self.have["log"]), hidden.text)
        metrics, last, odd = metrics_after(self.folder / METRICS, self.have, hidden.value)
        self._left_out(METRICS, odd)
        found: dict[str, Any] = {} if log is None else {"log": log}
        if metrics or last < self.have["step"]:
            found |= {"metrics": metrics, "last": last, "follows": self.have["line"]}
        return found

    def move(self, wanted: Mapping[str, Any], busy: str | None) -> None:
        """Brings the run one move nearer to what is wanted of it, and makes its report. `busy` is a run that is at work
        on this host."""
        try:
            if self.folder.is_symlink():
                raise ConfigError(f"{self.folder} is a link: a run's folder must stand in the folder of runs")
            if self.pid() is not None or self.lives():
                self._while_alive(wanted)
                return
            self._note_end()
            if wanted["desired"] == "running":
                self._while_wanted(wanted, busy)
            else:
                self._report("stopped")
        except (OSError, AjetError) as error:
            message = error.message if isinstance(error, AjetError) else str(error)
            self._report("failed", reason=self.host.hidden.text(message))

    def _while_alive(self, wanted: Mapping[str, Any]) -> None:
        pid, phase = self.pid(), self._phase()
        start = {} if pid is None else held.started(self.folder, pid)
        if pid is not None and not start and (self.process is None or self.process.pid != pid):
            self._report("waiting", reason=f"process {pid}, which is no trainer of ours, holds {self.folder}")
            return
        starts = start.get("starts", self.launched)
        if int(phase.get("step", 0)) > self.step:
            self.step, self.attempts = int(phase["step"]), 0
        if wanted["desired"] == "running" and starts == wanted["starts"]:
            fault = None if phase.get("config") == wanted["digest"] else self.host.hidden.text(phase.get("refused", ""))
            try:
                self._write(wanted)
            except ConfigError as error:  # the host allows it no longer
                fault = self.host.hidden.text(error.message)
            up = str(phase.get("phase", "")).startswith(TRAINING)
            self._report("running" if up else "starting", starts=starts, reason=fault or None)
            return
        if pid is not None and start and (self.urged or not self._was_told(start)):
            self.host.say(f"run {self.name}: asking its trainer to end")
            held.tell_to_end(self.folder, pid)
            put(self.folder / TOLD, json.dumps({"word": start["word"]}), PRIVATE)
            self.urged = False
        self._report("stopping", starts=starts)

    def _note_end(self) -> None:
        """Remembers how a trainer of ours ended."""
        if self.process is None:
            return
        code, self.process = self.process.wait(), None
        line = self.host.hidden.text(last_line(self.folder / LOG, self.log_from))
        self.ended |= {"exit_code": code, "reason": f"{_ended(code)}: {line}" if line else _ended(code)}
        self.attempts = 0 if self._was_told(read_json(self.folder / STARTED)) else self.attempts + 1
        pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.attempts - 1, 16)) if self.attempts else 0.0
        self.retry_at = self.host.clock() + pause

    def _while_wanted(self, wanted: Mapping[str, Any], busy: str | None) -> None:
        phase, starts = self._phase(), read_json(self.folder / STARTED).get("starts", 0)
        same = (self.ended.get("starts"), self.ended.get("digest")) == (wanted["starts"], wanted["digest"])
        told = self.ended | {"starts": starts}
        made = (phase.get("phase"), phase.get("config"), starts) == ("done", wanted["digest"], wanted["starts"])
        if made:
            self._report("done", **told | {"reason": "it has made all its steps"})
        elif same and self.ended.get("exit_code") == 2:
            self._report("failed", **told)
        elif same and self.host.clock() < self.retry_at:
            again = f"{self.ended['reason']} (it starts again in {self.retry_at - self.host.clock():.0f} s)"
            self._report("failed", **told | {"reason": again})
        elif busy is not None:
            self._report("waiting", reason=f"run {busy} is at work on this host: one trainer at a time")
        else:
            self._start(wanted)

    def _start(self, wanted: Mapping[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        self._write(wanted)
        log = self.folder / LOG
        self.launched, self.log_from = wanted["starts"], log.stat().st_size if log.exists() else 0
        self.ended = {"starts": wanted["starts"], "digest": wanted["digest"]}
        program = [sys.executable, "-m", held.__name__, str(self.folder), str(self.launched)]
        self.host.say(f"run {self.name}: starting its trainer")
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*program, *self.host.command, str(self.folder / CONFIG)], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=dict(self.host.env), start_new_session=True,
            )  # fmt: skip
        self._report("starting", starts=self.launched)

    def _write(self, wanted: Mapping[str, Any]) -> None:
        """Writes the configuration as the trainer's file. A trainer that runs looks at it between two steps."""
        document = self.host.allowed.document(self.name, wanted["config"], self.host.proxy)
        config_of(document)
        text, path = toml_of(document), self.folder / CONFIG
        if not path.exists() or path.read_text() != text:
            put(path, text, PRIVATE)

    def _report(self, state: str, **more: Any) -> None:
        (last, whole), now = phase_in(self.folder / PHASE), self._phase()
        self._left_out(PHASE, 0 if whole else 1)
        phase = self.host.hidden.text(now.get("phase", ""))
        known = {"step": last.get("step", 0), "of": last.get("of", 0), "phase": phase}
        self.report = {"state": state, "config": now.get("config"), **known} | {
            name: value for name, value in more.items() if name in ("starts", "exit_code", "reason")
        }

    def _phase(self) -> dict[str, Any]:
        """The phase of the trainer that started last; empty until it says anything."""
        try:
            fresh = (self.folder / PHASE).stat().st_mtime_ns >= (self.folder / STARTED).stat().st_mtime_ns
        except OSError:
            return {}
        return phase_in(self.folder / PHASE)[0] if fresh else {}

    def _was_told(self, start: Mapping[str, Any]) -> bool:
        """True if a supervisor has asked the trainer of this start to end. Asked twice, it ends in the middle."""
        return bool(read_json(self.folder / TOLD).get("word") == start.get("word", ""))

    def _left_out(self, file: str, odd: int) -> None:
        """Says once how much of a file cannot be shown."""
        if odd > self.odd.get(file, 0):
            self.host.say(
                f"run {self.name}: {odd} line(s) of {file} are left out: no JSON object with a whole step, or one with "
                "numbers over 64 bits, NaN, broken text, or too much nesting"
            )
        self.odd[file] = odd


def found_in(host: Host) -> dict[str, KeptRun]:
    """The runs that have a folder on this host, by name."""
    folders = sorted(host.allowed.runs.iterdir())
    names = [folder.name for folder in folders if os.path.exists(folder / LOCK) and not folder.is_symlink()]
    return {name: KeptRun(name, host) for name in names}


def _ended(code: int) -> str:
    if code == held.TAKEN:
        return "another process holds the run's folder"
    return f"ended by signal {-code}" if code < 0 else f"ended with {code}"
