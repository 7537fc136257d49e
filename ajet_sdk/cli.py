"""``ajet``: the agent's side on the command line.

Only click is loaded to parse arguments and to print help; the rest of the SDK is loaded by the command that needs it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ajet_sdk.errors import AjetError
from ajet_sdk.output import INTERRUPTED, OnceGroup, run_command, say

if TYPE_CHECKING:
    from ajet_sdk.client import Client
    from ajet_sdk.play.program import Program
    from ajet_sdk.play.tasks import Line

F = TypeVar("F", bound=Callable[..., Any])
PROXY_HELP = "The proxy's address.  [default: AJET_PROXY_URL, else http://127.0.0.1:8484]"
EPISODE_HELP = "Which episode.  [default: AJET_EPISODE]"
AWAIT_PROXY_S = 60.0
LOOK_S = 5.0
"""How long a command that only looks waits for a proxy; one that tells it something waits for `DEADLINE_S`."""
RUN_S = 600.0
"""How long `ajet run` waits for one that went away: by then programs have worked for their rewards."""
EVERY_MAX_S = 86400.0


@contextmanager
def usage() -> Iterator[None]:
    """What cannot be used as it was given is bad usage, before anything is asked of a proxy."""
    try:
        yield
    except AjetError as error:
        raise click.UsageError(error.message) from None


def episode_id(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuses what can name no episode."""
    from ajet_sdk.routes import check_id

    with usage():
        return None if value is None else check_id(value)


def text(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuses bytes that are no text in this locale."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("it holds bytes that are no text") from None
    return value


def label(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Refuses what a client cannot say of itself."""
    from ajet_sdk.routes import MAX_CLIENT_TEXT

    if value is not None and not 1 <= len(value) <= MAX_CLIENT_TEXT:
        raise click.BadParameter(f"it must have 1 to {MAX_CLIENT_TEXT} characters")
    return text(context, option, value)


def models(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Agents, each with its model, of words such as ``planner=MODEL``."""
    out: dict[str, str] = {}
    for value in values:
        name, equals, model = value.partition("=")
        if not (name and equals and model):
            raise click.BadParameter(f"it must be AGENT=MODEL, not {value!r}")
        if name in out:
            raise click.BadParameter(f"agent {name!r} has a model already: {out[name]!r}")
        text(context, option, value)
        out[name] = model
    return out


def proxy_option(command: F) -> F:
    return click.option("--proxy", metavar="URL", help=PROXY_HELP)(command)


class Commands(OnceGroup):
    """Knows `train` by name and imports it only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), "train"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "train":
            from ajet_sdk.runs.commands import train

            return train
        return super().get_command(ctx, name)


@click.group(
    cls=Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="ajet", prog_name="ajet", message="%(prog)s %(version)s")
def ajet() -> None:
    """Run agents through an ajet proxy, and reward them.

    The key comes from AJET_API_KEY, or from OPENAI_API_KEY if ajet issued it.
    """


def program_options(command: F) -> F:
    """What `run` and `try` both take."""
    options = (
        click.option(
            "--reward-cmd", metavar="CMD",
            help="A shell runs CMD after the program. The reward is the number that it prints, on a line alone or as "
            "in 'score: 0.5'.",
        ),
        click.option(
            "--reward-from", type=click.Choice(["exit-code", "stdout", "file"]),
            help="exit-code: 1.0 for 0, else 0.0. stdout: the last line that is a number. file: the same, in the file "
            "that AJET_REWARD_FILE names.  [default: what the program gives itself, else exit-code]",
        ),
        click.option("--agent", metavar="NAME", callback=text, help="The agent's name in the records."),
        click.option(
            "--model", metavar="NAME", callback=text,
            help="Answer every call with this model, except calls to models that the proxy serves by name.",
        ),
        click.option(
            "--agent-model", "members", metavar="AGENT=MODEL", multiple=True, callback=models,
            help="This agent learns as this model. The program asks for AGENT as its model. Repeat it for others.",
        ),
        click.option(
            "--teacher", "teachers", metavar="AGENT=MODEL", multiple=True, callback=models,
            help="Likewise, and what this agent samples is never trained.",
        ),
        click.option(
            "--intercept", is_flag=True,
            help="Catch a PROGRAM that takes no base URL at its provider's address. The proxy needs --intercept too.",
        ),
        proxy_option,
        click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED),
    )
    for option in reversed(options):
        command = option(command)
    return command


@ajet.command(context_settings={"allow_interspersed_args": False})
@click.option("--task", callback=text, help="What the program attempts. Runs of one task form a group.")
@click.option(
    "--tasks", metavar="FILE", type=click.Path(),
    help="A data set, one task a line: JSON, or plain text. It goes on where it was left.",
)
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Episodes of a task.")
@click.option(
    "--epochs", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="How often --tasks is played."
)
@click.option("--parallel", type=click.IntRange(1), default=1, show_default=True, metavar="P", help="How many at once.")
@click.option(
    "--retries", type=click.IntRange(0), default=2, show_default=True, metavar="N",
    help="How often to play again what failed because of the world (a call that went unanswered, exit code 75), "
    "and in --tasks for any reason.",
)
@click.option("--watch", is_flag=True, help="Start PROGRAM anew when its file changes.")
@click.option("--eval", "is_eval", is_flag=True, help="Record the episodes and never train on them.")
@click.option(
    "--wanted", is_flag=True, help="With --eval: play only what a trainer's evaluations want, until Ctrl-C."
)
@click.option("--quiet", "-q", is_flag=True, help="Show no output of the programs.")
@click.option(
    "--name", "client_name", metavar="NAME", callback=label,
    help="This client's name, and what playing --tasks is called. An older client of the name is gone.  [default: "
    "HOST:PROGRAM and a number of its own; PROGRAM-FILE]",
)
@click.option(
    "--lane", metavar="NAME", callback=label,
    help="The kind of the tasks.  [default: what a task's name has before its first slash]",
)
@click.option(
    "--revision", metavar="NAME", callback=label,
    help="Which code plays. A group holds one revision.  [default: a digest of PROGRAM's file, for each episode]",
)
@click.option(
    "--replace-older", is_flag=True, help="With --lane: discard what waits there under another revision."
)
@program_options
def run(
    task: str | None, tasks: str | None, repeat: int, epochs: int, parallel: int, retries: int, watch: bool,
    is_eval: bool, wanted: bool, quiet: bool, client_name: str | None, lane: str | None, revision: str | None,
    replace_older: bool, reward_cmd: str | None, reward_from: str | None, agent: str | None, model: str | None,
    members: dict[str, str], teachers: dict[str, str], intercept: bool, proxy: str | None, program: tuple[str, ...],
) -> int:
    """Run an unmodified program once per episode, and reward it.

    The program finds its model by OPENAI_BASE_URL and OPENAI_API_KEY (or their ANTHROPIC_ twins), and its task in
    AJET_TASK, with --tasks also its line in AJET_TASK_JSON. The exit code is 1 if no episode was rewarded, if the
    engine reports nothing that can be trained, or if something of --tasks is still missing.

    Example: ajet run --tasks train.jsonl --repeat 8 --parallel 32 -- python agent.py
    """
    from ajet_sdk.play.child import allow_files
    from ajet_sdk.play.screen import play_name, run_and_tell

    _check_run(task, tasks, epochs, watch, wanted, is_eval, program)
    if replace_older and not lane:
        raise click.UsageError("--replace-older needs --lane: in which lane is anything older?")
    lines = _lines(tasks) if tasks else [task or ""]
    most = parallel if wanted or tasks else min(parallel, repeat)
    play = None if tasks is None or wanted else client_name or play_name(program, Path(tasks))
    with usage():
        files = allow_files(most)
    how: dict[str, Any] = {"repeat": repeat, "parallel": parallel, "model": model, "agent": agent, "eval": is_eval}
    how |= team(model, members, teachers) | {"wanted": wanted}
    how |= {"play": play, "epochs": epochs, "retries": retries, "watch": watch}
    how |= {"client_name": client_name, "lane": lane, "revision": revision, "replace_older": replace_older}
    with playing(program, reward_cmd, reward_from, intercept, proxy, files) as (client, what):
        return run_and_tell(client, what, lines, quiet, **how)


@ajet.command("try", context_settings={"allow_interspersed_args": False})
@click.option("--task", default="try", show_default=True, callback=text, help="What the program attempts.")
@program_options
def try_(
    task: str, reward_cmd: str | None, reward_from: str | None, agent: str | None, model: str | None,
    members: dict[str, str], teachers: dict[str, str], intercept: bool, proxy: str | None, program: tuple[str, ...],
) -> int:
    """Play one episode that is never trained, and show what happens.

    Each call to the model is shown with what is new in its prompt, its answer and its tokens, between the output of the
    program.

    Example: ajet try --task sum/1 -- python agent.py
    """
    from ajet_sdk.play.child import allow_files
    from ajet_sdk.play.trial import try_and_tell

    if not task:
        raise click.UsageError("--task is empty: an unset variable?")
    both = team(model, members, teachers)
    with usage():
        files = allow_files(1)
    with playing(program, reward_cmd, reward_from, intercept, proxy, files) as (client, what):
        return try_and_tell(client, what, task, model=model, agent=agent, team=both)


def team(model: str | None, members: dict[str, str], teachers: dict[str, str]) -> dict[str, dict[str, str] | None]:
    """The ``members`` and ``teachers`` of an episode; None where there are none."""
    if both := members.keys() & teachers:
        raise click.UsageError(f"--teacher: agent {min(both)!r} has an --agent-model already")
    for agent, taught_by in teachers.items():
        if taught_by in members.values():
            raise click.UsageError(f"--teacher: an --agent-model learns as {taught_by!r}, so {agent!r} needs another")
        if taught_by == model:
            raise click.UsageError(f"--teacher: --model {model!r} learns, so {agent!r} needs another")
    return {"members": members or None, "teachers": teachers or None}


def _check_run(
    task: str | None, tasks: str | None, epochs: int, watch: bool, wanted: bool, is_eval: bool, program: tuple[str, ...]
) -> None:
    """Refuses options that do not go together, before anything is read or asked."""
    from ajet_sdk.play.revision import of_program

    if (task is None) == (tasks is None):
        raise click.UsageError("give --task, or --tasks FILE" + ("" if task is None else ", not both"))
    if task == "":
        raise click.UsageError("--task is empty: an unset variable?")
    if wanted and not is_eval:
        raise click.UsageError("--wanted needs --eval: what is trained is played without it")
    if epochs > 1 and (tasks is None or wanted):
        raise click.UsageError("--epochs needs --tasks, and no --wanted: it says how often a data set is played")
    if watch and not of_program(program).files:
        raise click.UsageError(f"--watch: {' '.join(program)[:80]!r} names no file of its own that could change")


def _lines(tasks: str) -> Sequence[Line]:
    """The tasks in a file. Each line that cannot be used is named, and then it is bad usage."""
    from ajet_sdk.play.tasks import BrokenLines, read_tasks

    with usage():
        try:
            return read_tasks(Path(tasks))
        except BrokenLines as error:
            for fault in error.faults:
                say(fault)
            raise


@contextmanager
def playing(
    program: tuple[str, ...], reward_cmd: str | None, reward_from: str | None, intercept: bool, proxy: str | None,
    files: tuple[int, int],
) -> Iterator[tuple[Client, Program]]:
    """What `run` and `try` play, and the proxy that they play it at, once it is there."""
    from contextlib import ExitStack

    from ajet_sdk.interception import intercepting
    from ajet_sdk.play.program import Program

    if reward_cmd is not None and reward_from is not None:
        raise click.UsageError("give --reward-cmd or --reward-from, not both")
    check_program(program[0])
    with client_for(proxy, RUN_S) as client, ExitStack() as stack:
        await_proxy(client)
        found = stack.enter_context(intercepting(client)) if intercept else None
        yield client, Program(
            program, reward_from=reward_from, reward_cmd=reward_cmd, interception=found, files=files
        )


@ajet.command(context_settings={"ignore_unknown_options": True})
@click.argument("value", type=float)
@click.option("--episode", metavar="ID", callback=episode_id, help=EPISODE_HELP)
@click.option("--call", metavar="ID", callback=text, help="Reward this call only.")
@click.option("--agent", metavar="NAME", callback=text, help="Reward this agent's samples only.")
@click.option("--model", metavar="NAME", callback=text, help="Reward only what this model sampled.")
@click.option("--state", metavar="NAME", callback=text, help="The state in which the call was made; needs --call.")
@click.option("--not-final", is_flag=True, help="Do not seal the episode, because more rewards will come.")
@proxy_option
def reward(
    value: float, episode: str | None, call: str | None, agent: str | None, model: str | None, state: str | None,
    not_final: bool, proxy: str | None,
) -> None:
    """Give an episode a reward.

    VALUE is a finite number. It may be negative.
    """
    from ajet_sdk.play.episode import current_episode, finite, rewarding
    from ajet_sdk.routes import Reward, check_id

    with usage():
        body = Reward(finite(value), call, agent, final=not not_final, state=state, model=model)
        found = check_id(current_episode(episode))
    with client_for(proxy) as client:
        client.drive(rewarding(client.target, found, body))


@ajet.command()
@click.option("--episode", metavar="ID", callback=episode_id, help=EPISODE_HELP)
@click.option("--reason", callback=text, help="The reason, in your own words.")
@click.option("--infra", is_flag=True, help="The world failed, and not the policy. `ajet run` plays it again.")
@proxy_option
def abort(episode: str | None, reason: str | None, infra: bool, proxy: str | None) -> None:
    """End an episode without training on it."""
    from ajet_sdk.play.episode import aborting, current_episode
    from ajet_sdk.routes import check_id

    with usage():
        found = check_id(current_episode(episode))
    with client_for(proxy) as client:
        client.drive(aborting(client.target, found, reason, "infra" if infra else None))


@ajet.command()
@click.option("--json", "as_json", is_flag=True, help="Print the proxy's answer as JSON.")
@proxy_option
def status(as_json: bool, proxy: str | None) -> None:
    """Show models, the gate, and episodes by state."""
    from ajet_sdk.views import status_view

    with client_for(proxy, LOOK_S) as client:
        show_json_or(as_json, client.ask("status").json(), status_view)


@ajet.command()
@click.argument("episode", callback=episode_id)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON, with token ids and logprobs.")
@proxy_option
def show(episode: str, as_json: bool, proxy: str | None) -> None:
    """Show the rewards, calls and timelines of one episode."""
    from ajet_sdk.play.episode import reading
    from ajet_sdk.views import episode_view

    with client_for(proxy, LOOK_S) as client:
        show_json_or(as_json, client.drive(reading(client.target, episode, as_json)), episode_view)


@ajet.command()
@click.argument("shares", nargs=-1, metavar="[LANE=SHARE]...")
@click.option("--ahead", type=click.IntRange(0), metavar="GROUPS", help="Groups open or ready at most. 0: any number.")
@click.option("--wait", type=float, metavar="SECONDS", help="How long a lane with nothing is waited for.")
@click.option("--any", "drop", is_flag=True, help="No shares any more: what is complete first is leased first.")
@click.option("--model", callback=text, help="Of this model, where several learn.")
@click.option("--json", "as_json", is_flag=True, help="Print the proxy's answer as JSON.")
@proxy_option
def mix(
    shares: tuple[str, ...], ahead: int | None, wait: float | None, drop: bool, model: str | None, as_json: bool,
    proxy: str | None,
) -> None:
    """Show or change how lanes share what is trained.

    A lane is a kind of task: what its name has before its first "/". Shares add up to 1:
    `ajet mix math=0.4 code=0.6`. It needs a key of scope trainer.
    """
    from ajet_sdk.routes import SetMix, check_shares
    from ajet_sdk.views import mix_view

    if drop and shares:
        raise click.UsageError("either shares or --any")
    with usage():
        found = shares_of(shares)
        if found is not None:
            check_shares(found)
    which = {} if model is None else {"model": model}
    with client_for(proxy, LOOK_S) as client:
        if drop:
            client.ask("drop_mix", **which)
        if found is not None or ahead is not None or wait is not None:
            client.ask("set_mix", SetMix(found, ahead, lane_wait_s=wait, model=model))
        show_json_or(as_json, client.ask("mix", **which).json(), mix_view)


@ajet.command()
@click.option("--lane", callback=text, help="Of this lane alone.")
@click.option("--task", callback=text, help="Of this task alone.")
@proxy_option
def flush(lane: str | None, task: str | None, proxy: str | None) -> None:
    """Wait no longer for episodes that groups still lack.

    What is ready is trained as smaller groups, or discarded where it is too little. It needs a key of scope trainer.
    """
    from ajet_sdk.routes import Flush

    with client_for(proxy, LOOK_S) as client:
        ended = client.ask("flush", Flush(lane, task)).json()["tasks"]
    click.echo(f"{ended} {'task' if ended == 1 else 'tasks'} ended")


@ajet.command()
@click.option("--json", "as_json", is_flag=True, help="Print the proxy's answer as JSON.")
@click.option(
    "--every", type=click.FloatRange(0.1, EVERY_MAX_S), metavar="SECONDS", help="Show it again until Ctrl-C."
)
@proxy_option
def clients(as_json: bool, every: float | None, proxy: str | None) -> None:
    """Show who plays what, at which revision, and how fast.

    After the clients that play come the latest that are gone.
    """
    from functools import partial

    from ajet_sdk.top import table, watch
    from ajet_sdk.views import clients_view

    if every is not None and (as_json or math.isnan(every)):
        raise click.UsageError("--every takes a number of seconds, and no --json")
    with client_for(proxy, LOOK_S) as client:
        if every is None:
            show_json_or(as_json, client.ask("clients").json(), clients_view)
        else:
            watch(client, every, sys.stdout, lambda: partial(table, clients_view(client.ask("clients").json())))


@ajet.command()
@click.option("--every", type=click.FloatRange(0.1, EVERY_MAX_S), default=2.0, show_default=True, metavar="SECONDS")
@proxy_option
def top(every: float, proxy: str | None) -> None:
    """Watch the run until Ctrl-C.

    The screen shows throughput, rewards, the queue, drift and slow agents.
    """
    from ajet_sdk.top import watch

    if math.isnan(every):
        raise click.UsageError("--every must be a number of seconds")
    with client_for(proxy, LOOK_S) as client:
        watch(client, every, sys.stdout)


def shares_of(words: Sequence[str]) -> dict[str, float] | None:
    """Words such as ``math=0.4``; None if there are none."""
    shares: dict[str, float] = {}
    for word in words:
        lane, equals, share = word.rpartition("=")
        try:
            shares[lane] = float(share)
        except ValueError:
            equals = ""
        if not equals:
            raise click.UsageError(f"{word!r} is not LANE=SHARE, such as math=0.4")
    if len(shares) < len(words):
        raise click.UsageError("a lane is named twice")
    return shares or None


@ajet.command()
def skill() -> None:
    """Print the page by which a coding assistant drives all of this."""
    from importlib.resources import files

    click.echo((files("ajet_sdk") / "SKILL.md").read_text(encoding="utf-8"), nl=False)


def client_for(proxy: str | None, deadline: float | None = None) -> Client:
    from ajet_sdk.client import Client
    from ajet_sdk.operations import DEADLINE_S

    with usage():
        return Client(proxy, deadline=DEADLINE_S if deadline is None else deadline)


def show_json_or(as_json: bool, answer: Any, view: Callable[[Any], str]) -> None:
    import json

    click.echo(json.dumps(answer, indent=2) if as_json else view(answer))


def check_program(name: str) -> None:
    """Refuses a program that is not there before any episode is opened for it."""
    import shutil

    if shutil.which(name) is None:
        there = shutil.which(name, os.F_OK) is not None
        raise click.UsageError(f"{name!r} is not executable" if there else f"there is no program {name!r}")


def await_proxy(client: Client) -> None:
    """Waits for a proxy that is still starting, and says so."""
    from dataclasses import replace

    from ajet_sdk.errors import NotReady, ProxyUnreachable
    from ajet_sdk.operations import request

    try:
        client.drive(request(replace(client.target, deadline=0.0), "status"))
    except (ProxyUnreachable, NotReady):
        say(f"waiting up to {AWAIT_PROXY_S:g} s for a proxy at {client.target.url}")
        client.drive(request(replace(client.target, deadline=AWAIT_PROXY_S), "status"))


def main() -> NoReturn:
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # and not ignored, as under nohup
            signal.signal(number, signal.default_int_handler)  # to be asked to end is to be interrupted
    run_command(ajet, "ajet", "it comes with ajet", explain=explain, interrupted=("ajet: interrupted", INTERRUPTED))


def explain(error: Exception) -> str | None:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        path = error.ctx.command_path
        return f"{path}: {error.format_message()} (see '{path} --help')"
    return f"ajet: {error}" if isinstance(error, OSError) else None
