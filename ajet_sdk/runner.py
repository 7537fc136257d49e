"""Runs an unmodified program, in any language, once per episode: the agent behind ``ajet run``.

The program is told where its model is by environment variables alone. Its reward is what `reward_cmd` or `reward_from`
says, if one was asked for. Otherwise it is what the program gave itself, or else 1.0 for exit code 0 and 0.0 for any
other. A reward that is no number, or a reward command that was killed, aborts the episode with that reason.

If the proxy has meanwhile discarded a program's episode (it idled out, or ran too long), the program is ended. So one
that hangs does not hold its place forever.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ajet_sdk import routes
from ajet_sdk.client import Client
from ajet_sdk.clients import Membership, membership
from ajet_sdk.episodes import Episode, reading
from ajet_sdk.errors import AjetError, BadRequest, Conflict
from ajet_sdk.interception import Interception
from ajet_sdk.operations import Target
from ajet_sdk.processes import Child, Limits, describe
from ajet_sdk.results import RunResult, RunResults
from ajet_sdk.revision import of_program, told
from ajet_sdk.rollouts import INTERRUPTED, Rollouts, name_of, start

REWARD_SOURCES = ("exit-code", "stdout", "file")
REWARD_FILE_VARIABLE = "AJET_REWARD_FILE"
SECRETS = ("AJET_API_KEY", "AJET_ADMIN_SECRET", "AJET_UPSTREAM_KEY")
"""Variables of this process, or of a proxy started by the same shell, that no program gets."""
END_GRACE_S = 5.0
WATCH_S = 10.0
_NUMBER = re.compile(r"(?<![\w.])(?<!\d,)[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?!\w|\.\w|,\d)")

OnOutput = Callable[[Episode, str, bytes], None]
"""Gets the episode, ``"stdout"`` or ``"stderr"``, and a line of its program's output; called by several threads."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run, and where its reward comes from: at most one of `reward_from` (`REWARD_SOURCES`) and `reward_cmd`.

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
        if self.reward_from is not None and self.reward_from not in REWARD_SOURCES:
            raise BadRequest(f"reward_from must be one of {', '.join(REWARD_SOURCES)}", param="reward_from")
        if self.reward_from is not None and self.reward_cmd is not None:
            raise BadRequest("a reward comes either from reward_from or from reward_cmd", param="reward_cmd")


def number_in(line: str) -> float | None:
    """The finite number that the whole line is, if it is one."""
    try:
        value = math.nan if "_" in line else float(line.strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class LastNumber:
    """Reads lines and remembers the last that is a number; with `anywhere`, the last number within a line too."""

    def __init__(self, *, anywhere: bool = False) -> None:
        self.value: float | None = None
        self._anywhere = anywhere

    def feed(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        value = number_in(text)
        if value is None and self._anywhere and (found := _NUMBER.findall(text)):
            value = number_in(found[-1])
        if value is not None:
            self.value = value


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


class ProgramAgent:
    """Calls `Program` as an agent of `ajet_sdk.rollouts`; use it as a context manager around the run."""

    def __init__(
        self, program: Program, client: Client, on_output: OnOutput | None = None, *, watch_s: float = WATCH_S
    ) -> None:
        self._program, self._client, self._on_output, self._watch_s = program, client, on_output, watch_s
        self._lock = threading.Lock()
        self._running: dict[str, Child] = {}
        self._lost: dict[str, str] = {}
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProgramAgent:
        start(self._watcher)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._watcher.join()

    def __call__(self, task: Any, episode: Episode) -> float | None:
        program = self._program
        env = {**os.environ, **program.env, **episode.env()}
        for name in SECRETS:  # whatever they open for us, the program's key is its episode's
            env.pop(name, None)
        if program.interception is not None:
            env = program.interception.environment(env, episode.api_key)
        else:
            env = reaching(env, episode.base_url)
        if program.reward_from == "file":
            with tempfile.TemporaryDirectory(prefix="ajet-") as folder:
                path, reader = Path(folder, "reward"), LastNumber()
                code, _ = self._run(program.argv, {**env, REWARD_FILE_VARIABLE: str(path)}, episode, LastNumber())
                with suppress(OSError):
                    for line in path.read_bytes().splitlines():
                        reader.feed(line)
            return self._judge(episode, code, reader.value, "no number in the file that AJET_REWARD_FILE names")
        code, value = self._run(program.argv, env, episode, LastNumber())
        if program.reward_cmd is not None:
            return self._by_command(program.reward_cmd, env, episode)
        if program.reward_from == "stdout":
            return self._judge(episode, code, value, "no line of its output is a number")
        if program.reward_from is None:
            record = episode.record()
            if record.get("state") != "open" or record.get("rewards"):
                return None
        return self._judge(episode, code, 1.0 if code == 0 else 0.0, "")

    def stop(self) -> None:
        """Ends every program that runs, and lets none begin; their episodes are aborted."""
        self._stopped.set()
        with self._lock:
            children = list(self._running.values())
        for child in children:
            child.ask_to_end()
        until = time.monotonic() + END_GRACE_S
        try:
            while children:
                children.pop().end(until - time.monotonic())
        finally:
            for child in children:
                child.end(0.0)

    def _judge(self, episode: Episode, code: int, value: float | None, lacking: str) -> float | None:
        """The reward, unless there is none: then the episode is aborted, saying why."""
        if value is None:
            episode.abort(f"{lacking} ({describe(code)})")
        return value

    def _by_command(self, command: str, env: Mapping[str, str], episode: Episode) -> float | None:
        code, value = self._run(("/bin/sh", "-c", command), env, episode, LastNumber(anywhere=True))
        if code < 0:
            episode.abort(f"the reward command was {describe(code)}")
            return None
        return self._judge(episode, code, value, "the reward command printed no number")

    def _run(
        self, argv: Sequence[str], env: Mapping[str, str], episode: Episode, reader: LastNumber
    ) -> tuple[int, float | None]:
        """Runs one command of the episode to its end: its exit code, and the last number that it printed."""

        def on_line(stream: str, line: bytes) -> None:
            if stream == "stdout":
                reader.feed(line)
            if self._on_output is not None:
                self._on_output(episode, stream, line)

        with self._lock:
            if self._stopped.is_set():
                raise Conflict(INTERRUPTED)
            child = Child(argv, env, on_line, cwd=self._program.cwd, files=self._program.files)
            self._running[episode.id] = child
        code = child.wait()
        with self._lock:
            del self._running[episode.id]
            lost = self._lost.pop(episode.id, None)
        if lost is not None:
            raise Conflict(f"the proxy discarded the episode while its program ran: {lost}")
        if self._stopped.is_set():
            raise Conflict(INTERRUPTED)
        return code, reader.value

    def _watch(self) -> None:
        """Ends programs whose episodes are discarded already."""
        target = replace(self._client.target, deadline=WATCH_S / 2)
        while not self._stopped.wait(self._watch_s):
            with self._lock:
                running = list(self._running.items())
            for episode, child in running:
                with suppress(AjetError):
                    record = self._client.drive(reading(target, episode, False))
                    if record.get("state") == "discarded":
                        self._end(child, episode, str(record.get("reason")))

    def _end(self, child: Child, episode: str, reason: str) -> None:
        with self._lock:
            if self._running.get(episode) is not child:
                return
            self._lost[episode] = reason
        child.ask_to_end()
        child.end(END_GRACE_S)


def run_program(
    program: Program,
    tasks: Iterable[str],
    *,
    repeat: int = 1,
    parallel: int = 1,
    model: str | None = None,
    agent: str | None = None,
    eval: bool = False,
    wanted: bool = False,
    client: Client | None = None,
    client_name: str | None = None,
    lane: str | None = None,
    revision: str | None = None,
    replace_older: bool = False,
    on_output: OnOutput | None = None,
    on_result: Callable[[RunResult], None] | None = None,
) -> RunResults:
    """Runs `program` `repeat` times for each task, up to `parallel` at once; see `ajet_sdk.run` for what it returns.

    Programs' output is handed to `on_output`, or dropped. KeyboardInterrupt ends the programs that run, with all that
    they have started, aborts their episodes, and is raised again. The revision is that of the program's file and of its
    reward command, unless it is named.
    """
    body, code = routes.OpenEpisode(None, model, agent, eval), of_program(program.argv, program.reward_cmd, program.cwd)
    with nullcontext(client) if client else Client() as own:
        member = membership(
            own, Membership, program=code.name, name=client_name, lane=lane, replace_older=replace_older,
            revision=told(revision, code),
        )
        with member, ProgramAgent(program, own, on_output) as runs:
            plan = (own, runs, tasks, repeat, parallel, body, name_of, on_result, wanted, member)
            return Rollouts(*plan, on_stop=runs.stop).run()
