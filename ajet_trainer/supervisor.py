"""``ajet-trainer serve``: keeps what runs on this host at what the daemon says is wanted.

Each turn it tells the daemon how its runs are, hears what is wanted, and makes one move for each run. It starts a
trainer, asks it to end, hands it a changed configuration, or waits. What it knows of a trainer it reads from the run's
folder: who holds the lock, which start that is, in which phase. So a supervisor that was killed goes on where it was,
with the trainer that went on without it. While the daemon is away, trainers go on, and what was wanted last is wanted.

One trainer runs at a time, since a host's devices are one. A second run waits, and its report says for whom.

Invariant: a trainer starts only in a folder that nobody holds (`ajet_trainer.held`). One that ended without being asked
to is started again, each time a while later, until it has made a step. One that cannot use its configuration is not
started again before something else is wanted.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from ajet_sdk.errors import AjetError, BadRequest, Conflict
from ajet_sdk.routes import Supervise
from ajet_sdk.runs import check_name
from ajet_sdk.settings import ConfigError
from ajet_trainer import held
from ajet_trainer.allowed import Allowed, config_of, toml_of
from ajet_trainer.config import SETTINGS, digest
from ajet_trainer.followed import last_line, log_after, metrics_after, phase_in
from ajet_trainer.hidden import Hidden

POLL_S = 1.0
"""How long the daemon holds a report while there is no news."""
TURN_S = 0.25
"""How long a turn takes at least, so that a daemon that holds nothing is not flooded."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 300.0
LOG, FILE = "trainer.log", "config.toml"
METRICS = "metrics.jsonl"
PHASE, STARTED, TOLD = "phase.json", "started.json", "told.json"
TRAINING = ("training", "waiting for", "draining", "pushing", "saving", "evaluating")
"""How phases begin in which a run is up."""


class Daemon(Protocol):
    """The daemon, as far as a supervisor speaks with it."""

    def supervise(self, said: Supervise) -> dict[str, Any]:
        """The answer to a report. Raises an `AjetError`, `Conflict` if another supervisor has our name."""
        ...


@dataclass
class Kept:
    """What is remembered of a run between two turns. ``launched`` is the number of the start that ``process`` is."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    launched: int = 0
    log_from: int = 0
    urged: bool = False
    attempts: int = 0
    retry_at: float = 0.0
    step: int = 0
    ended: dict[str, Any] = field(default_factory=dict)
    """How its last trainer ended, for which start and configuration."""
    have: Mapping[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    """Empty until it was looked at."""
    odd: dict[str, int] = field(default_factory=dict)
    """Of its files, how much was left out of what they say, because no report can carry it."""

    def phase(self) -> dict[str, Any]:
        """What the trainer that started last says of itself; empty until it says anything."""
        try:
            fresh = (self.folder / PHASE).stat().st_mtime_ns >= (self.folder / STARTED).stat().st_mtime_ns
        except OSError:
            return {}
        return phase_in(self.folder / PHASE)[0] if fresh else {}

    def was_told(self, start: Mapping[str, Any]) -> bool:
        """Whether a supervisor has asked the trainer of this start to end. Asked twice, it ends in the middle."""
        return bool(held.read_json(self.folder / TOLD).get("word") == start.get("word", ""))


class Supervisor:
    """`command` is what trains, with the file of its configuration behind it; `say` shows a line. `hidden` maps words
    of the host that nobody sees from afar to what is shown instead."""

    def __init__(
        self, allowed: Allowed, daemon: Daemon, proxy: str, name: str, *, say: Callable[[str], None],
        env: Mapping[str, str], hidden: Mapping[str, str] | None = None, command: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.allowed, self.daemon, self.proxy, self.name = allowed, daemon, proxy, check_name(name, "name")
        self._say, self._env, self._clock, self._sleep = say, dict(env), clock, sleep
        folders = {str(path): "…" for path in (allowed.runs, allowed.runs.resolve())}
        self._hidden = Hidden({**folders, proxy: "the daemon", **(hidden or {})})
        self._command = command or (sys.executable, "-m", "ajet_trainer.cli", "run", "--watch", "--config")
        self.runs: dict[str, Kept] = {}
        self.wanted: dict[str, Any] | None = None
        """By run, as the daemon said last; None as long as it has said nothing."""
        self.verdicts: dict[str, Any] = {}
        self.known = ""
        self.ending = False
        self._away = ""
        allowed.runs.mkdir(parents=True, exist_ok=True)
        self._lock = _alone(allowed.runs / ".lock")
        self._instance = self._folder_word()
        for folder in sorted(allowed.runs.iterdir()):
            if (folder / held.LOCK).exists() and not folder.is_symlink():
                self.runs[folder.name] = Kept(folder)

    def _folder_word(self) -> str:
        """The word of the folder of runs, by which the daemon knows it after a restart."""
        path = self.allowed.runs / ".supervisor"
        if not path.exists():
            held.replace(path, uuid.uuid4().hex)
        return path.read_text().strip()

    def end(self) -> None:
        """From now on nothing is wanted. A second time, trainers that end are asked again, and end at once."""
        if self.ending:
            for kept in self.runs.values():
                kept.urged = True
        self.ending = True

    def loop(self) -> None:
        """Until `end`, and until every trainer has ended then."""
        while True:
            began = self._clock()
            self.turn()
            if self.ending and not any(self._lives(kept) for kept in self.runs.values()):
                self._speak()
                return
            self._sleep(max(0.0, TURN_S - (self._clock() - began)))

    def turn(self) -> None:
        """Speaks with the daemon, then makes a move for each run."""
        self._speak()
        if self.wanted is None and not self.ending:
            return
        wanted = {} if self.ending else self.wanted or {}
        for run in wanted:
            self.runs.setdefault(run, Kept(self.allowed.runs / run))
        busy = next((run for run, kept in self.runs.items() if self._lives(kept)), None)
        for run in [*wanted, *(run for run in self.runs if run not in wanted)]:
            self._move(run, self.runs[run], wanted.get(run, {"desired": "stopped"}), busy)
            busy = busy or (run if self._lives(self.runs[run]) else None)

    # -- the daemon

    def _speak(self) -> None:
        lines = next((run for run in sorted(self.runs, key=self._quiet) if self._lines(run)), None)
        reports = {
            run: kept.report | (self._lines(run) if run == lines else {})
            for run, kept in self.runs.items() if kept.report and run in (self.wanted or {})
        }
        wait_s = 0.0 if self.ending or self.verdicts or lines is not None else POLL_S
        said = Supervise(self.name, self._instance, reports, self.verdicts, self.known, wait_s)
        try:
            answer = self._told(said)
        except Conflict as error:
            self._stay(error.message)
            self.wanted = {}  # it is the other's to do
            return
        except AjetError as error:
            self._stay(f"the daemon is away, trainers go on: {error.message}")
            return
        if self._away:
            self._say(f"the daemon at {self.proxy} is there again")
        self._away, self.known = "", answer["known"]
        self.wanted = {run: one for run, one in answer["runs"].items() if _usable(run)}
        for run, have in answer["have"].items():
            if run in self.runs:
                self.runs[run].have = have
        self.verdicts = {check: self._verdict(**asked) for check, asked in answer["checks"].items()}

    def _told(self, said: Supervise) -> dict[str, Any]:
        """The daemon's answer to a report. If it does not take that, it still says what is wanted."""
        try:
            return self.daemon.supervise(said)
        except BadRequest as error:
            self._stay(f"the daemon does not take what is said of the runs: {error.message}")
            return self.daemon.supervise(replace(said, runs={}, verdicts={}))

    def _stay(self, message: str) -> None:
        if message != self._away:
            self._say(message)
        self._away = message
        self._sleep(POLL_S)

    def _quiet(self, run: str) -> bool:
        return not self._lives(self.runs[run])

    def _lines(self, run: str) -> dict[str, Any]:
        """What of the run's files the daemon lacks."""
        kept = self.runs[run]
        if not kept.have or not kept.report or run not in (self.wanted or {}):
            return {}
        log = log_after(kept.folder / LOG, int(kept.have["log"]), self._hidden.text)
        metrics, last, odd = metrics_after(kept.folder / METRICS, kept.have, self._hidden.value)
        self._left_out(run, METRICS, odd)
        found: dict[str, Any] = {} if log is None else {"log": log}
        if metrics or last < kept.have["step"]:
            found |= {"metrics": metrics, "last": last, "follows": kept.have["line"]}
        return found

    def _verdict(self, run: str, config: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"digest": digest(config_of(self.allowed.document(check_name(run), config, self.proxy)))}
        except BadRequest as error:
            return {"error": self._hidden.text(error.message), "param": error.param}

    def _left_out(self, run: str, file: str, odd: int) -> None:
        """Says once how much of a file cannot be shown."""
        if odd > self.runs[run].odd.get(file, 0):
            self._say(
                f"run {run}: {odd} line(s) of {file} are left out: no JSON object with a whole step, or one with "
                "numbers over 64 bits, NaN, broken text, or too much nesting"
            )
        self.runs[run].odd[file] = odd

    # -- one run

    def _lives(self, kept: Kept) -> bool:
        return self._pid(kept) is not None or (kept.process is not None and kept.process.poll() is None)

    def _pid(self, kept: Kept) -> int | None:
        return held.holder(kept.folder) if kept.folder.is_dir() and not kept.folder.is_symlink() else None

    def _move(self, run: str, kept: Kept, wanted: Mapping[str, Any], busy: str | None) -> None:
        """Brings a run one move nearer to what is wanted of it, and makes its report."""
        try:
            if kept.folder.is_symlink():
                raise ConfigError(f"{kept.folder} is a link: a run's folder must stand in the folder of runs")
            if self._lives(kept):
                self._while_alive(run, kept, wanted)
            else:
                self._note_end(kept)
                if wanted["desired"] == "running":
                    self._while_wanted(run, kept, wanted, busy)
                else:
                    self._report(kept, "stopped")
        except (OSError, AjetError) as error:
            message = error.message if isinstance(error, AjetError) else str(error)
            self._report(kept, "failed", reason=self._hidden.text(message))

    def _while_alive(self, run: str, kept: Kept, wanted: Mapping[str, Any]) -> None:
        pid, phase = self._pid(kept), kept.phase()
        start = {} if pid is None else held.started(kept.folder, pid)
        if pid is not None and not start and (kept.process is None or kept.process.pid != pid):
            self._report(kept, "waiting", reason=f"process {pid}, which is no trainer of ours, holds {kept.folder}")
            return
        starts = start.get("starts", kept.launched)
        if int(phase.get("step", 0)) > kept.step:
            kept.step, kept.attempts = int(phase["step"]), 0
        if wanted["desired"] == "running" and starts == wanted["starts"]:
            fault = self._hand_over(run, kept, wanted)
            up = str(phase.get("phase", "")).startswith(TRAINING)
            self._report(kept, "running" if up else "starting", starts=starts, reason=fault)
            return
        if pid is not None and start and (kept.urged or not kept.was_told(start)):
            self._say(f"run {run}: asking its trainer to end")
            held.tell_to_end(kept.folder, pid)
            held.replace(kept.folder / TOLD, json.dumps({"word": start["word"]}))
            kept.urged = False
        self._report(kept, "stopping", starts=starts)

    def _hand_over(self, run: str, kept: Kept, wanted: Mapping[str, Any]) -> str | None:
        """Gives a trainer that runs what is wanted now. What is wrong with that, if the host allows it no longer."""
        try:
            self._write(run, kept, wanted)
        except ConfigError as error:
            return self._hidden.text(error.message)
        return None

    def _note_end(self, kept: Kept) -> None:
        """Remembers how a trainer of ours ended."""
        if kept.process is None:
            return
        code, kept.process = kept.process.wait(), None
        line = self._hidden.text(last_line(kept.folder / LOG, kept.log_from))
        kept.ended |= {"exit_code": code, "reason": f"{_ended(code)}: {line}" if line else _ended(code)}
        kept.attempts = 0 if kept.was_told(held.read_json(kept.folder / STARTED)) else kept.attempts + 1
        pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(kept.attempts - 1, 16)) if kept.attempts else 0.0
        kept.retry_at = self._clock() + pause

    def _while_wanted(self, run: str, kept: Kept, wanted: Mapping[str, Any], busy: str | None) -> None:
        phase, starts = kept.phase(), held.read_json(kept.folder / STARTED).get("starts", 0)
        same = (kept.ended.get("starts"), kept.ended.get("digest")) == (wanted["starts"], wanted["digest"])
        told = kept.ended | {"starts": starts}
        made = (phase.get("phase"), phase.get("config"), starts) == ("done", wanted["digest"], wanted["starts"])
        if made:
            self._report(kept, "done", **told | {"reason": "it has made all its steps"})
        elif same and kept.ended.get("exit_code") == 2:
            self._report(kept, "failed", **told)
        elif same and self._clock() < kept.retry_at:
            again = f"{kept.ended['reason']} (it starts again in {kept.retry_at - self._clock():.0f} s)"
            self._report(kept, "failed", **told | {"reason": again})
        elif busy is not None:
            self._report(kept, "waiting", reason=f"run {busy} is at work on this host: one trainer at a time")
        else:
            self._start(run, kept, wanted)

    def _start(self, run: str, kept: Kept, wanted: Mapping[str, Any]) -> None:
        kept.folder.mkdir(exist_ok=True)
        self._write(run, kept, wanted)
        log = kept.folder / LOG
        kept.launched, kept.log_from = wanted["starts"], log.stat().st_size if log.exists() else 0
        kept.ended = {"starts": wanted["starts"], "digest": wanted["digest"]}
        program = [sys.executable, "-m", "ajet_trainer.held", str(kept.folder), str(kept.launched)]
        self._say(f"run {run}: starting its trainer")
        with log.open("ab") as out:
            kept.process = subprocess.Popen(
                [*program, *self._command, str(kept.folder / FILE)], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=self._env, start_new_session=True,
            )  # fmt: skip
        self._report(kept, "starting", starts=kept.launched)

    def _write(self, run: str, kept: Kept, wanted: Mapping[str, Any]) -> None:
        """The configuration as the trainer's file. A trainer that runs looks at it between two steps."""
        document = self.allowed.document(run, wanted["config"], self.proxy)
        config_of(document)
        text, path = toml_of(document), kept.folder / FILE
        if not path.exists() or path.read_text() != text:
            held.replace(path, text)

    def _report(self, kept: Kept, state: str, **more: Any) -> None:
        (last, whole), now = phase_in(kept.folder / PHASE), kept.phase()
        self._left_out(kept.folder.name, PHASE, 0 if whole else 1)
        phase = self._hidden.text(now.get("phase", ""))
        known = {"step": last.get("step", 0), "of": last.get("of", 0), "phase": phase}
        kept.report = {"state": state, "config": now.get("config"), **known} | {
            name: value for name, value in more.items() if name in ("starts", "exit_code", "reason")
        }


def _usable(run: str) -> bool:
    try:
        return check_name(run) == run
    except BadRequest:
        return False


def _ended(code: int) -> str:
    if code == held.TAKEN:
        return "another process holds the run's folder"
    return f"ended by signal {-code}" if code < 0 else f"ended with {code}"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What trainers are started with: `environ`, in which no setting of a run may stand. Raises `ConfigError`."""
    ours = (*map(SETTINGS.variable, ("key", "tls_cert", "engine_key")), "AJET_UPSTREAM_KEY")
    for name in environ:
        if name.startswith(SETTINGS.prefix) and name not in ours:
            raise ConfigError(f"{name}: a run's configuration says it, and no variable of the supervisor", param=name)
    return {name: value for name, value in environ.items() if not name.startswith("AJET_") or name in ours}


def _alone(path: Path) -> IO[str]:
    """The lock of a folder of runs, held as long as the file is open. Raises `ConfigError`."""
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"another supervisor keeps the runs in {path.parent}", param="runs") from None
    return file


