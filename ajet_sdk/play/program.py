"""Runs an unmodified program, in any language, once per episode: the agent behind ``ajet run``.

The program finds its model by environment variables alone. `ajet_sdk.rewards` decides what it earns then, and if the
world failed and not the program.

If the proxy has meanwhile discarded a program's episode (it idled out, or ran too long), the program is ended. So one
that hangs does not hold its place forever. If this process is killed, `ajet_sdk.play.guardian` ends the programs.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ajet_sdk.blocking import Client, nothing, wait
from ajet_sdk.client import Target
from ajet_sdk.errors import AjetError, BadRequest, Conflict, NotReady, ProxyUnreachable
from ajet_sdk.interception import Interception
from ajet_sdk.play.blocking import Episode
from ajet_sdk.play.child import Child, Limits
from ajet_sdk.play.episode import reading
from ajet_sdk.play.guardian import Guardian
from ajet_sdk.play.membership import Membership, Revision
from ajet_sdk.play.options import RunOptions
from ajet_sdk.play.patience import Absence, Patience
from ajet_sdk.play.results import RunResults
from ajet_sdk.play.revision import Changes, of_program
from ajet_sdk.play.rollouts import INTERRUPTED, ProgramChanged, Rollouts
from ajet_sdk.play.tasks import Line
from ajet_sdk.play.threads import ThreadHands, carried_out, start
from ajet_sdk.rewards import sources
from ajet_sdk.rewards.blame import Busy
from ajet_sdk.rewards.decision import FULL, TEMPORARY, Ended, Fails, Source
from ajet_sdk.rewards.numbers import LastNumber

REWARD_FILE_VARIABLE = "AJET_REWARD_FILE"
TASK_VARIABLE = "AJET_TASK_JSON"
SECRETS = ("AJET_API_KEY", "AJET_ADMIN_SECRET", "AJET_UPSTREAM_KEY")
"""Variables of this process, or of a proxy started by the same shell, that no program gets."""
END_GRACE_S = 5.0
CHANGE_GRACE_S = 2.0
"""A program that has changed may take so long to end."""
MOST_OTHERS = 5
"""After so many revisions in a row under which nothing was played, the program is taken to change its own code."""
QUICK_S = 2.0
"""A program that fails within this time has failed at once."""
LEAST_STREAK = 3
TICK_S, WATCH_S, ENGINE_S, LOOK_S = 0.4, 10.0, 5.0, 4.0
NO_ENGINE = (
    "the daemon has no engine yet, and requests wait for one. Name it (ajet-proxy serve --upstream URL), or start a "
    "trainer that brings its own"
)

OnOutput = Callable[[Episode, str, bytes], None]
"""Gets the episode, ``"stdout"`` or ``"stderr"``, and a line of its program's output; called by several threads."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run, and where its reward comes from: at most one of `reward_from` (a name in
    `ajet_sdk.rewards.sources.NAMED`) and `reward_cmd`.

    `env` is added to this process's own environment, `cwd` is where it runs. With ``reward_from="file"`` the program
    finds the path of the file in ``AJET_REWARD_FILE``. `reward_cmd` is for ``sh -c``. With `interception` it gets
    no base URL, but what it needs to be intercepted. `files` is its limit of open files; None: this process's.
    """

    argv: Sequence[str]
    reward_from: str | None = None
    reward_cmd: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    interception: Interception | None = None
    files: Limits | None = None

    def __post_init__(self) -> None:
        if isinstance(self.argv, (str, bytes)):
            raise BadRequest(f"argv must be a list of words, not one text: [{self.argv!r}]", param="argv")
        if not self.argv:
            raise BadRequest("there is no program to run", param="argv")
        if self.reward_from not in sources.NAMED:
            known = ", ".join(filter(None, sources.NAMED))
            raise BadRequest(f"reward_from must be one of {known}", param="reward_from")
        if self.reward_from is not None and self.reward_cmd is not None:
            raise BadRequest("a reward comes either from reward_from or from reward_cmd", param="reward_cmd")

    @property
    def source(self) -> Source:
        """Where its reward comes from."""
        return sources.NAMED[self.reward_from][0] if self.reward_cmd is None else sources.graded


def _written(env: Mapping[str, str]) -> bytes:
    """The file of the program's reward, where it has one and has written it. A pipe, say, is none."""
    with suppress(OSError, KeyError):
        path = Path(env[REWARD_FILE_VARIABLE])
        return path.read_bytes() if path.is_file() else b""
    return b""


def reaching(env: Mapping[str, str], url: str) -> dict[str, str]:
    """`env`, with the host of `url` exempt from the HTTP proxy that `env` may name, if that host is this machine."""
    out, host = dict(env), urlsplit(url).hostname or ""
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        before = env.get(name) or env.get(other) or ""
        if Target(url).local and before != "*":  # which means every host only if it stands alone
            out[name] = ",".join(dict.fromkeys((*filter(None, before.split(",")), host)))
    return out


def proxy_variable(url: str, environ: Mapping[str, str]) -> str | None:
    """The variable of `environ` by which an HTTP proxy may stand between a program and `url`, if any."""
    kind = urlsplit(url).scheme
    names = (f"{kind}_proxy", f"{kind}_proxy".upper(), "all_proxy", "ALL_PROXY")
    return None if Target(url).local else next((name for name in names if environ.get(name)), None)


class Streak:
    """Counts programs that fail as soon as they begin. If they do so one after the other and without a call to a model,
    they are most likely broken, and going on would only burn tasks. After `most` in a row nothing may begin: until the
    program has changed if that is waited for, and else the run ends."""

    def __init__(self, most: int, *, waits: bool, say: Callable[[str], None] = lambda line: None) -> None:
        self._most, self._waits, self._say = max(LEAST_STREAK, most), waits, say
        self._failed = 0
        self._lock = threading.Lock()

    def began(self, *, well: bool) -> None:
        """A program has begun, and did not fail at once if it began `well`."""
        with self._lock:
            before, self._failed = self._failed, 0 if well else self._failed + 1
        if before < self._most <= self._failed and self._waits:
            self._say(f"{self._words()}. Nothing more begins until its file changes")

    def changed(self) -> None:
        """The program is another one now."""
        with self._lock:
            self._failed = 0

    def held(self) -> bool:
        """True if nothing may begin; `AjetError` if that will not change."""
        if self._failed < self._most:
            return False
        if not self._waits:
            raise AjetError(f"{self._words()}: nothing more is begun. Mend it and start again")
        return True

    def _words(self) -> str:
        return f"the program failed {self._most} times in a row within {QUICK_S:g} s, without a call to a model"


@dataclass(slots=True)
class _Running:
    """A program that runs. Until it is `steady` it may still be reading its code. It is ended if it has `changed`, or
    if its episode is `lost` for a reason."""

    child: Child
    episode: Episode
    began: float
    steady: bool = False
    changed: bool = False
    lost: str | None = None


class ProgramAgent:
    """Calls `Program` as an agent of `ajet_sdk.play.rollouts`; use it as a context manager around the run."""

    def __init__(
        self, program: Program, client: Client, on_output: OnOutput | None = None, *, streak: Streak | None = None,
        code: Callable[[], str | None] = lambda: None, say: Callable[[str], None] = lambda line: None,
        tick: Callable[[], None] = nothing,
    ) -> None:
        """`streak` counts how the programs begin. `code` tells the revision of now; None: that is not known. An
        episode whose program may have begun with another one than it was opened under is given up. `say` is called with
        words, once, how rewards may be missed, and what the programs wait for; `tick` is called twice a second."""
        self._program, self._client, self._on_output = program, client, on_output
        self._streak, self._code, self._say, self._tick = streak, code, say, tick
        self._hinted, self._patience = False, Patience()
        self._absence = Absence(client.target.url, client.target.deadline)
        self._others: set[str | None] = set()
        """The revisions that were found in place of those looked for, since the last one that was as it should be."""
        self._fault: Exception | None = None
        """The error that a callback has raised as the programs were watched."""
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._stopped = threading.Event()
        self._guardian = Guardian()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProgramAgent:
        start(self._watcher)
        self._guardian.__enter__()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop()
        self._watcher.join()
        self._guardian.__exit__()
        if error is None and self._fault is not None:
            raise self._fault

    def __call__(self, task: Any, episode: Episode) -> None:
        env, program = self._environment(task, episode), self._program
        with ExitStack() as stack:
            if program.reward_from == "file":
                made = tempfile.TemporaryDirectory(prefix="ajet-", ignore_cleanup_errors=True)  # somebody may write on
                folder = stack.enter_context(made)
                env[REWARD_FILE_VARIABLE] = str(Path(folder, "reward"))
            code, printed = self._play(env, episode)
            ended = Ended(code=code, printed=printed, written=_written(env))
        if program.reward_cmd is not None and ended.gave_up is None:
            graded, verdict = self._run(("/bin/sh", "-c", program.reward_cmd), env, episode)
            ended = replace(ended, graded=graded, verdict=verdict)
        decision = wait(episode.settle(None if episode.judged else program.source, ended))
        if isinstance(decision, Fails) and decision.hint is not None:
            with self._lock:  # once in a run
                said, self._hinted = self._hinted, True
            if not said:
                self._say(decision.hint)

    def _environment(self, task: Any, episode: Episode) -> dict[str, str]:
        env = {**os.environ, **self._program.env, **episode.env(), **self._guardian.mark}
        if isinstance(task, Line):
            env[TASK_VARIABLE] = task.json
        for name in SECRETS:  # whatever they open for us, the program's key is its episode's
            env.pop(name, None)
        if self._program.interception is not None:
            return self._program.interception.environment(env, episode.api_key)
        return reaching(env, episode.base_url)

    def _play(self, env: Mapping[str, str], episode: Episode) -> tuple[int, LastNumber]:
        began = time.monotonic()
        code, printed = self._run(self._program.argv, env, episode)
        episode.program_failed = sources.describe(code) if code != 0 else None
        if code == FULL:
            raise Busy(f"exit code {FULL}")
        if self._streak is not None:
            quick = code not in (0, TEMPORARY) and time.monotonic() - began < QUICK_S
            if not quick:
                self._streak.began(well=True)
            elif (calls := self._calls_now(episode)) is not None:
                self._streak.began(well=calls > 0)
        return code, printed

    def _calls_now(self, episode: Episode) -> int | None:
        """The number of calls that the episode has made; None if the proxy is away, as no program can do well then."""
        try:
            record = wait(reading(self._client.core.but(deadline=0.0), episode.id))
        except (ProxyUnreachable, NotReady):
            return None
        return len(record.get("calls") or ())

    def stop(self) -> None:
        """Ends every program that runs, and lets none begin; their episodes are aborted."""
        self._stopped.set()
        _end_all([run.child for run in self._runs()], END_GRACE_S)

    def restart(self) -> None:
        """Ends every program that runs, because there is a newer one; their episodes are the world's failures."""
        self._end_changed(self._runs())

    def _runs(self) -> list[_Running]:
        with self._lock:
            return list(self._running.values())

    def _end_changed(self, runs: list[_Running]) -> None:
        for run in runs:
            run.changed = True
        _end_all([run.child for run in runs], CHANGE_GRACE_S)

    def never_steady(self) -> bool:
        """False; or `AjetError` if the code has changed each time that a program began. What a callback has raised as
        the programs were watched is raised."""
        if self._fault is not None:
            raise self._fault
        if len(self._others) >= MOST_OTHERS:
            raise AjetError(
                f"the code of the program changed {MOST_OTHERS} times in a row as it began. If it writes a file "
                "that counts as its code, name the revision (--revision)"
            )
        return False

    def _is_other(self, episode: Episode) -> bool:
        """True if the code is not that any more under which `episode` was opened."""
        if episode.revision is None or (found := self._code()) == episode.revision:
            return False
        with self._lock:
            self._others.add(found)
        return True

    def _run(self, argv: Sequence[str], env: Mapping[str, str], episode: Episode) -> tuple[int, LastNumber]:
        """Runs one command of the episode to its end: its exit code, and what it printed."""
        reader = LastNumber()

        def on_line(stream: str, line: bytes) -> None:
            if stream == "stdout":
                reader.feed(line)
            if self._on_output is not None:
                self._on_output(episode, stream, line)

        with self._lock:
            if self._stopped.is_set():
                raise Conflict(INTERRUPTED)
            child = Child(argv, env, on_line, cwd=self._program.cwd, files=self._program.files)
            run = self._running[episode.id] = _Running(child, episode, time.monotonic())
        if self._is_other(episode):
            run.changed = True
            child.end(0.0)
        try:
            code = child.wait()
        except BaseException:  # an interrupt, or a fault of a callback
            _end_all([child], END_GRACE_S)
            raise
        finally:
            with self._lock:
                del self._running[episode.id]
        if run.changed or (not run.steady and self._is_other(episode)):
            raise ProgramChanged("the program changed")
        with self._lock:
            self._others.clear()
        if run.lost is not None:
            raise Conflict(f"the proxy discarded the episode while its program ran: {run.lost}")
        if self._stopped.is_set():
            raise Conflict(INTERRUPTED)
        return code, reader

    def _watch(self) -> None:
        """Ends programs that have begun with other code, and those whose episodes are discarded already."""
        looked = asked = time.monotonic()
        while not self._stopped.wait(TICK_S):
            self._call(self._tick)
            now = time.monotonic()
            settled = [run for run in self._runs() if not run.steady and run.began + QUICK_S <= now]
            others = [run for run in settled if self._is_other(run.episode)]
            for run in settled:
                run.steady = True
            self._end_changed(others)
            if now - asked >= ENGINE_S:
                asked = now
                self._look_at_the_proxy(now)
            if now - looked >= WATCH_S and not self._absence.away:
                looked = now
                self._end_discarded()

    def _look_at_the_proxy(self, now: float) -> None:
        """Says that the proxy is away, or after a while that requests wait for an engine, where it has none."""
        away = waits = False
        try:
            deadline = 0.0 if self._absence.away else LOOK_S
            status = wait(self._client.core.but(deadline=deadline).ask("status")).json()
        except (ProxyUnreachable, NotReady):
            away = True
        except AjetError:
            pass
        else:
            waits = bool(self._running) and _wait_for_an_engine(status)
        lines = self._absence.seen(away=away), self._patience.waits(None, NO_ENGINE if waits else None, now)
        for line in filter(None, lines):
            self._call(self._say, line)

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        """Calls what the caller gave. What it raises ends the run, but not the watch over the programs."""
        try:
            callback(*args)
        except Exception as error:
            self._fault = self._fault or error

    def _end_discarded(self) -> None:
        """Ends the programs whose episodes are discarded. All of them are asked after at once."""
        runs = self._runs()
        lost = []
        for run, record in zip(runs, wait(_records(self._client, [run.episode.id for run in runs])), strict=True):
            if record.get("state") == "discarded":
                run.lost = str(record.get("reason"))
                lost.append(run.child)
        _end_all(lost, END_GRACE_S)


async def _records(client: Client, episodes: Sequence[str]) -> list[dict[str, Any]]:
    """The records of `episodes`; an empty one where the proxy gives none in time."""
    from asyncio import gather

    asked = client.core.but(deadline=WATCH_S / 2)
    found = await gather(*(reading(asked, episode) for episode in episodes), return_exceptions=True)
    return [record if isinstance(record, dict) else {} for record in found]


def _wait_for_an_engine(status: Any) -> bool:
    """True if by the proxy's `status` requests wait, and no engine could answer them."""
    if not isinstance(status, dict) or not (status.get("requests") or {}).get("waiting"):
        return False
    served = [*(status.get("models") or {}).values(), status.get("any_model") or {}]
    return not any(one.get("upstreams") for one in served)


def _end_all(children: list[Child], grace: float) -> None:
    """Asks all of them to end, and kills those that have not within `grace` seconds."""
    for child in children:
        child.ask_to_end()
    until = time.monotonic() + grace
    try:
        while children:
            children.pop().end(until - time.monotonic())
    finally:
        for child in children:
            child.end(0.0)


def run_program(
    program: Program, tasks: Iterable[str | Line], *, repeat: int = 1, parallel: int = 1, watch: bool = False,
    client: Client | None = None, on_output: OnOutput | None = None, **options: Any,
) -> RunResults:
    """Runs `program` `repeat` times for each task, up to `parallel` at once; see `ajet_sdk.run`. `options` are the
    fields of `ajet_sdk.play.options.RunOptions`.

    Programs' output is handed to `on_output`, or dropped. KeyboardInterrupt ends the programs that run, with all that
    they have started, aborts their episodes, and is raised again. The revision is that of the program's own file,
    unless it is named.

    With `watch`, the program is started anew whenever this file changes. The episodes of the old one are given up, and
    played again. Where there is a `play` or a `watch`, a program that fails as soon as it begins ends the run, or waits
    for the file to change.
    """
    how = RunOptions(repeat=repeat, parallel=parallel, **options)
    if how.judged and (program.reward_from is not None or program.reward_cmd is not None):
        raise BadRequest("a judge rewards what is to be judged: leave reward_from and reward_cmd out", param="judged")
    code = of_program(program.argv, program.cwd)
    streak = Streak(parallel, waits=watch, say=how.say) if watch or how.play is not None else None
    if watch and code.file is None:
        raise BadRequest("the program names no file of its own, so there is nothing to watch", param="watch")
    if watch:
        how.say(f"watching {code.file}")
    changes = Changes(code) if watch else None
    with ExitStack() as stack:
        own = client or stack.enter_context(Client(how.proxy_url, how.api_key, deadline=how.deadline))
        revision: Revision = code if how.revision is None else lambda: how.revision

        def held() -> bool:
            return runs.never_steady() or (streak is not None and streak.held())

        def begin_anew() -> None:
            if changes is not None and streak is not None and changes.look():
                how.say(f"{code.file} has changed: the program begins anew")
                streak.changed()
                rollouts.forgive()
                runs.restart()

        runs = ProgramAgent(program, own, on_output, streak=streak, code=revision, say=how.say, tick=begin_anew)
        member = Membership(own.target, how.joining(code.name), revision, lambda line: None)  # `runs` says it
        graded = program.reward_from is not None or program.reward_cmd is not None
        rollouts = Rollouts(own.core, runs, tasks, how, member, hands=ThreadHands, held=held, graded=graded)
        stack.enter_context(runs)
        return carried_out(rollouts, how, runs.stop)
