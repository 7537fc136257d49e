"""``ajet``: the agent's side on the command line.

Only click is loaded to parse arguments and to print help; the rest of the SDK is loaded by the command that needs it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ajet_sdk.errors import AjetError
from ajet_sdk.output import INTERRUPTED, Copies, run_command, say

if TYPE_CHECKING:
    from ajet_sdk.client import Client
    from ajet_sdk.runner import Program

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


def proxy_option(command: F) -> F:
    return click.option("--proxy", metavar="URL", help=PROXY_HELP)(command)


class Commands(click.Group):
    """Knows `train` by name and imports it only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), "train"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "train":
            from ajet_sdk.train_commands import train

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


@ajet.command(context_settings={"allow_interspersed_args": False})
@click.option("--task", required=True, callback=text, help="What the program attempts. Runs of one task form a group.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="How many episodes.")
@click.option("--parallel", type=click.IntRange(1), default=1, show_default=True, metavar="P", help="How many at once.")
@click.option("--reward-cmd", metavar="CMD", help="A shell runs CMD after the program. The reward is its last number.")
@click.option(
    "--reward-from",
    type=click.Choice(["exit-code", "stdout", "file"]),
    help="exit-code: 1.0 for 0, else 0.0. stdout: the last line that is a number. file: the same, in the file that "
    "AJET_REWARD_FILE names.  [default: what the program gives itself, else exit-code]",
)
@click.option("--eval", "is_eval", is_flag=True, help="Record the episodes and never train on them.")
@click.option(
    "--wanted", is_flag=True, help="With --eval: play only what a trainer's evaluations want, until Ctrl-C."
)
@click.option("--agent", metavar="NAME", callback=text, help="The agent's name in the records.")
@click.option(
    "--model", metavar="NAME", callback=text,
    help="Answer every call with this model, except calls to models that the proxy serves by name.",
)
@click.option(
    "--intercept", is_flag=True,
    help="Catch a PROGRAM that takes no base URL at its provider's address. The proxy needs --intercept too.",
)
@click.option("--quiet", "-q", is_flag=True, help="Show only the table, and no output of the programs.")
@proxy_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    task: str, repeat: int, parallel: int, reward_cmd: str | None, reward_from: str | None, is_eval: bool, wanted: bool,
    agent: str | None, model: str | None, intercept: bool, quiet: bool, proxy: str | None, program: tuple[str, ...],
) -> int:
    """Run an unmodified program once per episode, and reward it.

    The program finds its model by OPENAI_BASE_URL and OPENAI_API_KEY (or their ANTHROPIC_ twins), and its task in
    AJET_TASK. The exit code is 1 if no episode was rewarded, or if the engine reports nothing that can be trained.

    Example: ajet run --task sum/1 --repeat 8 -- python agent.py
    """
    from contextlib import ExitStack

    from ajet_sdk.interception import intercepting
    from ajet_sdk.processes import allow_files
    from ajet_sdk.runner import Program

    if reward_cmd is not None and reward_from is not None:
        raise click.UsageError("give --reward-cmd or --reward-from, not both")
    if not task:
        raise click.UsageError("--task is empty: an unset variable?")
    if wanted and not is_eval:
        raise click.UsageError("--wanted needs --eval: what is trained is played without it")
    check_program(program[0])
    with usage():
        files = allow_files(parallel if wanted else min(parallel, repeat))
    with client_for(proxy, RUN_S) as client, ExitStack() as stack:
        await_proxy(client)
        found = stack.enter_context(intercepting(client)) if intercept else None
        what = Program(program, reward_from=reward_from, reward_cmd=reward_cmd, interception=found, files=files)
        how = {"repeat": repeat, "parallel": parallel, "model": model, "agent": agent, "eval": is_eval}
        return run_and_tell(client, what, task, quiet, wanted=wanted, **how)


@ajet.command(context_settings={"ignore_unknown_options": True})
@click.argument("value", type=float)
@click.option("--episode", metavar="ID", callback=episode_id, help=EPISODE_HELP)
@click.option("--call", metavar="ID", callback=text, help="Reward this call only.")
@click.option("--agent", metavar="NAME", callback=text, help="Reward this agent's samples only.")
@click.option("--state", metavar="NAME", callback=text, help="The state in which the call was made; needs --call.")
@click.option("--not-final", is_flag=True, help="Do not seal the episode, because more rewards will come.")
@proxy_option
def reward(
    value: float, episode: str | None, call: str | None, agent: str | None, state: str | None, not_final: bool,
    proxy: str | None,
) -> None:
    """Give an episode a reward.

    VALUE is a finite number. It may be negative.
    """
    from ajet_sdk.episodes import current_episode, finite, rewarding
    from ajet_sdk.routes import Reward, check_id

    with usage():
        body = Reward(finite(value), call, agent, final=not not_final, state=state)
        found = check_id(current_episode(episode))
    with client_for(proxy) as client:
        client.drive(rewarding(client.target, found, body))


@ajet.command()
@click.option("--episode", metavar="ID", callback=episode_id, help=EPISODE_HELP)
@click.option("--reason", callback=text, help="The reason, in your own words.")
@proxy_option
def abort(episode: str | None, reason: str | None, proxy: str | None) -> None:
    """End an episode without training on it."""
    from ajet_sdk.episodes import aborting, current_episode
    from ajet_sdk.routes import check_id

    with usage():
        found = check_id(current_episode(episode))
    with client_for(proxy) as client:
        client.drive(aborting(client.target, found, reason))


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
    from ajet_sdk.episodes import reading
    from ajet_sdk.views import episode_view

    with client_for(proxy, LOOK_S) as client:
        show_json_or(as_json, client.drive(reading(client.target, episode, as_json)), episode_view)


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


def run_and_tell(client: Client, program: Program, task: str, quiet: bool, **how: Any) -> int:
    """Runs the episodes and prints their table, also of a run that was interrupted; the exit code."""
    from ajet_sdk.results import RunResult, RunResults
    from ajet_sdk.runner import proxy_variable, run_program
    from ajet_sdk.untold import UNTOLD

    done: list[RunResult] = []
    copies = Copies(named=how["parallel"] > 1)
    try:
        shown = None if quiet else copies
        found = run_program(program, [task], client=client, on_output=shown, on_result=done.append, **how)
        code = 0 if found.kept or (found.rewards and not found.untold) else 1
    except KeyboardInterrupt:
        say("interrupted: the open episodes are aborted")
        code = INTERRUPTED
    if copies.lost is not None:
        say(f"some of the programs' output could not be written: {copies.lost}")
    results = RunResults(sorted(done, key=lambda item: item.index))
    click.echo(("" if copies.at_line_start else "\n") + results.table())
    if why := next((item.untold for item in results.untold), None):
        some = f"{len(results.untold)} of them cannot" if results.kept else "nothing of this run can"
        say(f"{some} be trained: the engine {UNTOLD[why].fault} ({why}); {UNTOLD[why].remedy}")
    if empty := [item for item in done if item.ok and item.reason is not None and item.untold is None]:
        needs = "use OPENAI_BASE_URL" if program.interception is None else "use HTTPS_PROXY, and trust SSL_CERT_FILE"
        lacking = f"{len(empty)} of them had no whole answer of a model"
        variable = None if program.interception else proxy_variable(client.target.url, os.environ)
        between = f" {variable} is set: does that proxy lead to {client.target.url}?" if variable else ""
        say(f"{lacking}: does the program {needs}, and see no errors?{between}")
    return code


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
