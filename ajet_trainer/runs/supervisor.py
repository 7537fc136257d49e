"""``ajet-trainer serve`` and its supervisor, which keeps what runs on this host at what the daemon says is wanted.

Each turn it tells the daemon how its runs are, hears what is wanted, and makes one move for each run (`kept_run`).
While the daemon is away, trainers go on, and what was wanted last is wanted.

One trainer runs at a time, since a host's devices are one. A second run waits, and its report says for whom.
"""

from __future__ import annotations

import platform
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from ajet_sdk.address import server
from ajet_sdk.errors import AjetError, BadRequest, Conflict
from ajet_sdk.limits import check_name
from ajet_sdk.routes import Supervise
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import SETTINGS, Config, digest
from ajet_trainer.link import Link
from ajet_trainer.run_folder import hold, word_in
from ajet_trainer.runs.allowed import Allowed, config_of, read
from ajet_trainer.runs.hidden import Hidden
from ajet_trainer.runs.kept_run import COMMAND, Host, KeptRun, found_in

POLL_S = 1.0
"""The time for which the daemon holds a report while there is no news."""
TURN_S = 0.25
"""The time that a turn takes at least, so that a daemon that holds nothing is not flooded."""
ANSWER_S = 5.0
"""The time for an answer: trainers are not looked after meanwhile."""
LEAST_SECRET = 8
"""Characters. A shorter word may be in any line."""


class Supervisor:
    """`daemon` is the link to the daemon. `command` is what trains, with the file of its configuration behind it; `say`
    shows a line. `hidden` maps words of the host that nobody sees from afar to what is shown instead."""

    def __init__(
        self, allowed: Allowed, daemon: Link, proxy: str, name: str, *, say: Callable[[str], None],
        env: Mapping[str, str], hidden: Mapping[str, str] | None = None, command: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.allowed, self.daemon, self.proxy, self.name = allowed, daemon, proxy, check_name(name, "name")
        self._say, self._clock, self._sleep = say, clock, sleep
        folders = {str(path): "…" for path in (allowed.runs, allowed.runs.resolve())}
        self._hidden = Hidden({**folders, proxy: "the daemon", **(hidden or {})})
        self._host = Host(allowed, proxy, dict(env), self._hidden, say, command, clock)
        self.wanted: dict[str, Any] | None = None
        """By run, as the daemon said last; None as long as it has said nothing."""
        self.verdicts: dict[str, Any] = {}
        self.known = ""
        self.ending = False
        self._away = ""
        allowed.runs.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = hold(allowed.runs, ".lock")
        except BlockingIOError:
            raise ConfigError(f"another supervisor keeps the runs in {allowed.runs}", param="runs") from None
        self._instance = word_in(allowed.runs / ".supervisor")  # by which the daemon knows the folder again
        self.runs = found_in(self._host)

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
            if self.ending and not any(kept.lives() for kept in self.runs.values()):
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
            self.runs.setdefault(run, KeptRun(run, self._host))
        busy = next((run for run, kept in self.runs.items() if kept.lives()), None)
        for run in [*wanted, *(run for run in self.runs if run not in wanted)]:
            self.runs[run].move(wanted.get(run, {"desired": "stopped"}), busy)
            busy = busy or (run if self.runs[run].lives() else None)

    # -- the daemon

    def _speak(self) -> None:
        kept = {run: self.runs[run] for run in sorted(self.runs) if run in (self.wanted or {})}
        news = ((run, one.lines()) for run, one in sorted(kept.items(), key=lambda item: not item[1].lives()))
        lines = next((one for one in news if one[1]), None)
        reports = {run: one.report for run, one in kept.items() if one.report}
        if lines is not None:
            reports[lines[0]] = reports[lines[0]] | lines[1]
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

    def _verdict(self, run: str, config: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"digest": digest(config_of(self.allowed.document(check_name(run), config, self.proxy)))}
        except BadRequest as error:
            return {"error": self._hidden.text(error.message), "param": error.param}


def _usable(run: str) -> bool:
    try:
        return check_name(run) == run
    except BadRequest:
        return False


def serve(proxy: str, allow: str, name: str | None, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Keeps runs until SIGTERM or SIGINT. Raises `ConfigError` for what cannot be used."""
    env, url = environment(environ), proxy.rstrip("/")
    if server(url) is None:
        raise ConfigError("--proxy must be http://HOST:PORT", param="proxy")
    config = Config(proxy_url=url, **SETTINGS.in_environment(env))
    link = Link.of(config, deadline_s=0.0, answer_s=ANSWER_S)
    called = name or re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:64] or "host"
    keeper = Supervisor(read(allow), link, url, called, say=say, env=env, hidden=hidden_in(environ, config))

    def end(number: int, frame: FrameType | None) -> None:
        say("ending: trainers save and end first")
        keeper.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    say(f"supervisor {called} keeps runs in {keeper.allowed.runs}")
    keeper.loop()


def hidden_in(environ: Mapping[str, str], config: Config) -> dict[str, str]:
    """Words that nobody sees from afar, with what is shown instead: our key, certificate, and what trainers have in
    variables such as HF_TOKEN."""
    named = (value for name, value in environ.items() if re.search(r"(KEY|TOKEN|SECRET|PASSWORD)$", name))
    words = {word for word in (config.key, *named, config.tls_cert) if len(word) >= LEAST_SECRET}
    return dict.fromkeys(sorted(words), "***")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of trainers: `environ`, in which no setting of a run may stand. Raises `ConfigError`."""
    ours = (*map(SETTINGS.variable, ("key", "tls_cert", "engine_key")), "AJET_UPSTREAM_KEY")
    for name in environ:
        if name.startswith(SETTINGS.prefix) and name not in ours:
            raise ConfigError(f"{name}: a run's configuration says it, and no variable of the supervisor", param=name)
    return {name: value for name, value in environ.items() if not name.startswith("AJET_") or name in ours}
