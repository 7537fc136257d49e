"""``ajet run`` and ``ajet try``: programs that are played, with the options of `ajet_sdk.play.options.RunOptions`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ajet_sdk.commands import F, client_for, label, proxy_option, text, usage
from ajet_sdk.errors import NotReady, ProxyUnreachable
from ajet_sdk.output import OnceCommand, say
from ajet_sdk.rewards.sources import NAMED

if TYPE_CHECKING:
    from ajet_sdk.blocking import Client
    from ajet_sdk.play.options import RunOptions
    from ajet_sdk.play.program import Program
    from ajet_sdk.play.tasks import Line

AWAIT_PROXY_S = 60.0
RUN_S = 600.0
"""`ajet run` waits so long for a proxy that went away: by then programs have worked for their rewards."""


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


def program_options(command: F) -> F:
    """Adds the options that `run` and `try` both take."""
    options = (
        click.option(
            "--reward-cmd", metavar="CMD",
            help="A shell runs CMD after the program. The reward is the number that it prints, on a line alone or as "
            "in 'score: 0.5'.",
        ),
        click.option(
            "--reward-from", type=click.Choice([name for name in NAMED if name]),
            help=" ".join(f"{name}: {said}." for name, (_, said) in NAMED.items() if name)
            + f"  [default: {NAMED[None][1]}]",
        ),
        click.option("--agent", "agent_name", metavar="NAME", callback=text, help="The agent's name in the records."),
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


@click.command(cls=OnceCommand, context_settings={"allow_interspersed_args": False})
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
@click.option("--eval", is_flag=True, help="Record the episodes and never train on them.")
@click.option(
    "--judged", is_flag=True, help="Leave the rewards to `ajet judge`, but for those that PROGRAM gives itself."
)
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
    task: str | None, tasks: str | None, watch: bool, quiet: bool, reward_cmd: str | None, reward_from: str | None,
    intercept: bool, proxy: str | None, program: tuple[str, ...], **options: Any,
) -> int:
    """Run an unmodified program once per episode, and reward it.

    The program finds its model by OPENAI_BASE_URL and OPENAI_API_KEY (or their ANTHROPIC_ twins), and its task in
    AJET_TASK, with --tasks also its line in AJET_TASK_JSON. The exit code is 1 if no episode was rewarded, if the
    engine reports nothing that can be trained, or if something of --tasks is still missing.

    Example: ajet run --tasks train.jsonl --repeat 8 --parallel 32 -- python agent.py
    """
    from ajet_sdk.play.revision import of_program
    from ajet_sdk.play.screen import run_and_show

    if (task is None) == (tasks is None):
        raise click.UsageError("give --task, or --tasks FILE" + ("" if task is None else ", not both"))
    if watch and of_program(program).file is None:
        raise click.UsageError(f"--watch: {' '.join(program)[:80]!r} names no file of its own that could change")
    if options["judged"] and (reward_cmd or reward_from):
        raise click.UsageError("--judged leaves the rewards to a judge: leave --reward-cmd and --reward-from out")
    wanted, parallel = options["wanted"], options["parallel"]
    if tasks is not None and not wanted:
        options["play"] = options["client_name"] or f"{of_program(program).name}-{Path(tasks).name}"
    checked(task, **options)
    lines = _lines(tasks) if tasks else [task or ""]
    most = parallel if wanted or tasks else min(parallel, options["repeat"])
    with playing(program, most, reward_cmd, reward_from, intercept, proxy) as (client, what):
        return run_and_show(client, what, lines, quiet=quiet, watch=watch, **options)


@click.command("try", cls=OnceCommand, context_settings={"allow_interspersed_args": False})
@click.option("--task", default="try", show_default=True, callback=text, help="What the program attempts.")
@program_options
def try_(
    task: str, reward_cmd: str | None, reward_from: str | None, intercept: bool, proxy: str | None,
    program: tuple[str, ...], **options: Any,
) -> int:
    """Play one episode that is never trained, and show what happens.

    Each call to the model is shown with what is new in its prompt, its answer and its tokens, between the output of the
    program.

    Example: ajet try --task sum/1 -- python agent.py
    """
    from ajet_sdk.play.trial import try_and_show

    how = checked(task, **options)
    with playing(program, 1, reward_cmd, reward_from, intercept, proxy) as (client, what):
        return try_and_show(client, what, task, how)


def checked(task: str | None, **options: Any) -> RunOptions:
    """The options of a run, as bad usage where they do not go together, before anything is read or asked."""
    from ajet_sdk.play.options import RunOptions

    if task == "":
        raise click.UsageError("--task is empty: an unset variable?")
    with usage():
        how = RunOptions(**options)
        how.opening(task=task)
        how.joining("program")
    return how


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
    argv: tuple[str, ...], parallel: int, reward_cmd: str | None, reward_from: str | None, intercept: bool,
    proxy: str | None,
) -> Iterator[tuple[Client, Program]]:
    """The proxy at which `run` and `try` play, once it is there, and the program that they play."""
    from ajet_sdk.interception import intercepting
    from ajet_sdk.play.child import allow_files
    from ajet_sdk.play.program import Program

    if shutil.which(argv[0]) is None:
        there = shutil.which(argv[0], os.F_OK) is not None
        raise click.UsageError(f"{argv[0]!r} is not executable" if there else f"there is no program {argv[0]!r}")
    with usage():
        program = Program(argv, reward_from=reward_from, reward_cmd=reward_cmd, files=allow_files(parallel))
    with client_for(proxy, RUN_S) as client:
        await_proxy(client)
        with intercepting(client) if intercept else nullcontext() as found:
            yield client, replace(program, interception=found)


def await_proxy(client: Client) -> None:
    """Waits for a proxy that is still starting, and says so."""
    from ajet_sdk.blocking import wait

    try:
        wait(client.core.but(deadline=0.0).ask("status"))
    except (ProxyUnreachable, NotReady):
        say(f"waiting up to {AWAIT_PROXY_S:g} s for a proxy at {client.target.url}")
        wait(client.core.but(deadline=AWAIT_PROXY_S).ask("status"))
