"""``ajet``: the agent's side on the command line.

Only click is loaded to parse arguments and to print help; the rest of the SDK is loaded by the command that needs it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from ajet_sdk.commands import LOOK_S, client_for, episode_id, proxy_option, show_json_or, text, usage
from ajet_sdk.output import INTERRUPTED, OnceGroup, run_command

EPISODE_HELP = "Which episode.  [default: AJET_EPISODE]"
EVERY_MAX_S = 86400.0
ELSEWHERE = {
    "judge": "ajet_sdk.judge.commands", "run": "ajet_sdk.play.commands", "train": "ajet_sdk.runs.commands",
    "try": "ajet_sdk.play.commands",
}  # fmt: skip
"""Commands that are loaded when they are asked for."""


class Commands(OnceGroup):
    """Knows the commands of other modules by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *ELSEWHERE])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in ELSEWHERE:
            return super().get_command(ctx, name)
        found: click.Command = getattr(import_module(ELSEWHERE[name]), "try_" if name == "try" else name)
        return found


@click.group(
    cls=Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="ajet", prog_name="ajet", message="%(prog)s %(version)s")
def ajet() -> None:
    """Run agents through an ajet proxy, and reward them.

    The key comes from AJET_API_KEY, or from OPENAI_API_KEY if ajet issued it.
    """


@ajet.command(context_settings={"ignore_unknown_options": True})
@click.argument("value", type=float)
@click.option("--episode", metavar="ID", callback=episode_id, help=EPISODE_HELP)
@click.option("--call", metavar="ID", callback=text, help="Reward this call only.")
@click.option("--response", metavar="ID", callback=text, help="Reward the call with this answer, in any episode.")
@click.option("--agent", metavar="NAME", callback=text, help="Reward this agent's samples only.")
@click.option("--model", metavar="NAME", callback=text, help="Reward only what this model sampled.")
@click.option("--state", metavar="NAME", callback=text, help="The state in which the call was made; needs --call.")
@click.option("--note", metavar="TEXT", help="Words to keep beside the reward.")
@click.option("--not-final", is_flag=True, help="Do not seal the episode, because more rewards will come.")
@proxy_option
def reward(value: float, episode: str | None, not_final: bool, proxy: str | None, **of: Any) -> None:
    """Give an episode a reward.

    VALUE is a finite number. It may be negative.
    """
    from ajet_sdk.blocking import wait
    from ajet_sdk.bodies import check_episode
    from ajet_sdk.play.episode import current_episode, rewarding
    from ajet_sdk.rewards.numbers import finite
    from ajet_sdk.routes import Reward

    with usage():
        body = Reward(finite(value), final=not not_final, **of)
        found = episode if body.response is not None else check_episode(current_episode(episode))
    with client_for(proxy) as client:
        wait(rewarding(client.core, found, body))


@ajet.command()
@click.option("--episode", metavar="ID", callback=episode_id, help=EPISODE_HELP)
@click.option("--reason", help="The reason, in your own words.")
@click.option("--infra", is_flag=True, help="The world failed, and not the policy. `ajet run` plays it again.")
@proxy_option
def abort(episode: str | None, reason: str | None, infra: bool, proxy: str | None) -> None:
    """End an episode without training on it."""
    from ajet_sdk.blocking import wait
    from ajet_sdk.bodies import check_episode
    from ajet_sdk.play.episode import aborting, current_episode

    with usage():
        found = check_episode(current_episode(episode))
    with client_for(proxy) as client:
        wait(aborting(client.core, found, reason, "infra" if infra else None))


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
    from ajet_sdk.blocking import wait
    from ajet_sdk.play.episode import reading
    from ajet_sdk.views import episode_view

    with client_for(proxy, LOOK_S) as client:
        show_json_or(as_json, wait(reading(client.core, episode, as_json)), episode_view)


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
    from ajet_sdk.routes import SetMix
    from ajet_sdk.views import mix_view

    if drop and shares:
        raise click.UsageError("either shares or --any")
    with usage():
        change = SetMix(shares_of(shares), ahead, lane_wait_s=wait, model=model)
    which = {} if model is None else {"model": model}
    with client_for(proxy, LOOK_S) as client:
        if drop:
            client.ask("drop_mix", **which)
        if change != SetMix(model=model):
            client.ask("set_mix", change)
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

    with usage():
        body = Flush(lane, task)
    with client_for(proxy, LOOK_S) as client:
        ended = client.ask("flush", body).json()["tasks"]
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


def main() -> NoReturn:
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # and not ignored, as under nohup
            signal.signal(number, signal.default_int_handler)  # to be asked to end is to be interrupted
    run_command(
        ajet, "ajet", "it comes with ajet", interrupted=("ajet: interrupted", INTERRUPTED),
        explain=lambda error: f"ajet: {error}" if isinstance(error, OSError) else None,
    )
