"""The options of a run, once for all who run agents: `run` of both faces, `run_program`, ``ajet run``, ``ajet try``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ajet_sdk import routes
from ajet_sdk.client import DEADLINE_S
from ajet_sdk.errors import BadRequest
from ajet_sdk.play.membership import own_name
from ajet_sdk.play.patience import warn
from ajet_sdk.play.results import Progress, RunResult
from ajet_sdk.play.tasks import Line, named


def name_of(task: Any) -> str:
    """The name of a task: a string or integer itself, that of a mapping (`named`), or what a line of a file is
    called."""
    if isinstance(task, Line):
        return task.name
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(task, Mapping):
            return named(task)
    if isinstance(task, (str, int)) and not isinstance(task, bool) and str(task):
        return str(task)
    raise BadRequest(
        "a task must be a string, an integer, or a mapping that has one of them under 'task' or 'id', or is JSON; pass "
        f"name= to say what {repr(task)[:80]} is called",
        param="tasks",
    )


def said_by(task: Any) -> str:
    """All of a task that JSON can say, which is the same in every process. Of other values it has the type alone."""
    if isinstance(task, Line):
        return task.json
    with suppress(TypeError, ValueError, RecursionError):
        return json.dumps(task, sort_keys=True, default=lambda one: type(one).__name__)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The way in which a run goes through its tasks.

    `repeat` episodes of each task are played, up to `parallel` at once. `name` turns a task into its name. `model`,
    `members`, `teachers`, `eval` and `judged` are those of `ajet_sdk.episode`; `agent_name` is the agent's name in the
    records.

    With `wanted` (and `eval`), only the evaluation episodes are played that a trainer wants, and the run ends by an
    interrupt alone. Each evaluation goes through the tasks from the first on. Programs that share one go through them
    together, if all have the same tasks and the same `repeat`.

    With `play`, a name of your own, the tasks are a data set that is played `epochs` times. The proxy knows what is
    missing of it, so a run that is killed goes on where it was. Whatever discards an episode, its rollout is played
    again, `retries` times by this run and again by the next one.

    A rollout that the world failed is played again, up to `retries` times, and each attempt has a result of its own.
    Exceptions of the classes `infra` say that the world failed, too.

    This process is a client of the proxy while it runs, under `client_name` or a name of its own. If it dies, what it
    has open is discarded. Another one of its name ends it with a `Conflict`. `lane` is the kind of its tasks; unset,
    it follows from their names. `revision` names the code of agent and reward; unset, that is a digest of the agent's
    file. With `replace_older`, what waits in the lane and was played under another revision is discarded.

    `on_result` is called as each rollout ends, by the thread that ran it, and `on_progress` with how far a play is, at
    its beginning and its end. `say` is called with words for what the run waits for. `proxy_url` and `api_key` default
    to the environment's, and `deadline` is how long an operation may try to be acknowledged.
    """

    repeat: int = 8
    parallel: int = 32
    name: Callable[[Any], str] = name_of
    model: str | None = None
    agent_name: str | None = None
    members: Mapping[str, str] | None = None
    teachers: Mapping[str, str] | None = None
    eval: bool = False
    judged: bool = False
    wanted: bool = False
    play: str | None = None
    epochs: int = 1
    retries: int = 2
    infra: tuple[type[BaseException], ...] = ()
    client_name: str | None = None
    lane: str | None = None
    revision: str | None = None
    replace_older: bool = False
    on_result: Callable[[RunResult], None] | None = None
    on_progress: Callable[[Progress], None] = lambda _: None
    say: Callable[[str], None] = warn
    proxy_url: str | None = None
    api_key: str | None = None
    deadline: float = DEADLINE_S

    def __post_init__(self) -> None:
        if self.play is None and self.epochs != 1:
            raise BadRequest("epochs belong to a play of a data set, which has a name (play)", param="epochs")
        if self.play is not None and self.wanted:
            raise BadRequest("what a trainer wants is no play: leave one of them out", param="play")
        if self.wanted and not self.eval:
            raise BadRequest("only evaluations are wanted: set eval too", param="wanted")
        least = {"repeat": 1, "parallel": 1, "epochs": 1, "retries": 0}
        for option, number in least.items():
            if (given := getattr(self, option)) < number:
                raise BadRequest(f"{option} must be at least {number}, not {given}", param=option)

    def opening(self, **more: Any) -> routes.OpenEpisode:
        """The request that opens an episode of the run; `more` is what this episode has besides."""
        return routes.OpenEpisode(
            **{"model": self.model, **more}, agent=self.agent_name, eval=self.eval, members=self.members or None,
            teachers=self.teachers or None, judged=self.judged,
        )  # fmt: skip

    @property
    def paced(self) -> bool:
        """True if the proxy may hold episodes back until training has come as far."""
        return not self.eval or bool(self.members or self.teachers)

    def lane_of(self, task: str) -> str:
        """The lane of a task that is called so."""
        return self.lane or routes.lane_of(task)

    def joining(self, program: str) -> routes.Join:
        """The request by which a client joins that runs `program`."""
        name = own_name(program) if self.client_name is None else self.client_name
        return routes.Join(name, lane=self.lane, replaces_older=self.replace_older)
