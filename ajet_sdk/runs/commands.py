"""``ajet train``: runs of a trainer, started, changed, watched and stopped from wherever the daemon can be reached."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ajet_sdk.commands import LOOK_S, client_for, proxy_option, show_json_or, usage
from ajet_sdk.limits import check_name
from ajet_sdk.output import OnceGroup, say
from ajet_sdk.runs import MIX, flat, literal, tables
from ajet_sdk.settings import read_toml

if TYPE_CHECKING:
    from ajet_sdk.blocking import Client

FOLLOW_S = 1.0
SHOWN = ("reward_mean", "reward_std", "lr", "pg_loss", "staleness_mean")
"""The figures of a step in a line of metrics."""


def run_name(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuses what can name no run."""
    with usage():
        return None if value is None else check_name(value)


def run_argument(command: Any) -> Any:
    return click.argument("run", callback=run_name)(command)


@click.group(cls=OnceGroup, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def train() -> None:
    """Drive training from afar: start, change, watch, stop.

    A supervisor (`ajet-trainer serve`) does it, on a host with the engine environment. The key needs scope operator.
    """


@train.command()
@click.option("--config", "file", metavar="FILE", help="TOML file like the trainer's.  [default: as it was]")
@click.option("--supervisor", metavar="NAME", help="Whose run it is, if there are several.")
@click.option("--restart", is_flag=True, help="If the run is under way, start it again with what has changed.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@proxy_option
@run_argument
def start(
    run: str, file: str | None, supervisor: str | None, restart: bool, as_json: bool, proxy: str | None
) -> None:
    """Have a run trained.

    A new one needs --config. One that was stopped goes on from its last checkpoint.
    """
    from ajet_sdk.routes import ChangeRun, PutRun

    if file is None and supervisor is not None:
        raise click.UsageError("--supervisor goes with --config")
    with usage():
        config = None if file is None else tables(flat(read_toml(file)))
    with client_for(proxy) as client:
        if config is None:
            answer = client.ask("change_run", ChangeRun(desired="running", restart=restart), id=run)
        else:
            answer = client.ask("put_run", PutRun(config, "running", supervisor, restart), id=run)
    show_json_or(as_json, answer.json(), run_view)


@train.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@proxy_option
@run_argument
def stop(run: str, as_json: bool, proxy: str | None) -> None:
    """Have a run stopped, after its step and a checkpoint."""
    from ajet_sdk.routes import ChangeRun

    with client_for(proxy) as client:
        show_json_or(as_json, client.ask("change_run", ChangeRun(desired="stopped"), id=run).json(), run_view)


@train.command("set")
@click.option("--restart", is_flag=True, help="Start the run again if a key cannot change while it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@proxy_option
@run_argument
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_keys(run: str, assignments: tuple[str, ...], restart: bool, as_json: bool, proxy: str | None) -> None:
    """Change keys of a run.

    A KEY without a dot is one of [trainer], mix.LANE is the share of a lane, and other KEYs with dots are verl's. An
    empty VALUE takes a key away.
    """
    from ajet_sdk.routes import ChangeRun

    config: dict[str, dict[str, Any]] = {}
    for word in assignments:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{word!r} is not KEY=VALUE")
        table = MIX if key.startswith(f"{MIX}.") else "verl" if "." in key else "trainer"
        config.setdefault(table, {})[key.removeprefix(f"{table}.")] = literal(text) if text else None
    with usage():
        flat(config)
    with client_for(proxy) as client:
        show_json_or(as_json, client.ask("change_run", ChangeRun(config, restart=restart), id=run).json(), run_view)


@train.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@proxy_option
@click.argument("run", required=False, callback=run_name)
def status(run: str | None, as_json: bool, proxy: str | None) -> None:
    """Show what is wanted of runs, how they are, and why the two differ."""
    with client_for(proxy, LOOK_S) as client:
        if run is None:
            show_json_or(as_json, client.ask("list_runs").json(), runs_view)
        else:
            show_json_or(as_json, client.ask("get_run", id=run).json(), run_view)


@train.command()
@click.option("--follow", "-f", is_flag=True, help="Go on until Ctrl-C.")
@proxy_option
@run_argument
def log(run: str, follow: bool, proxy: str | None) -> None:
    """Show what a run's trainer says."""
    with client_for(proxy, LOOK_S) as client:
        for line in lines(client, "run_log", run, follow):
            click.echo(line)


@train.command()
@click.option("--follow", "-f", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as it stands in metrics.jsonl.")
@proxy_option
@run_argument
def metrics(run: str, follow: bool, as_json: bool, proxy: str | None) -> None:
    """Show the figures of a run's steps."""
    with client_for(proxy, LOOK_S) as client:
        for line in lines(client, "run_metrics", run, follow):
            click.echo(json.dumps(line) if as_json else figures(line))


def lines(client: Client, route: str, run: str, follow: bool) -> Iterator[Any]:
    """The lines that the daemon has; with `follow` those that come, too. A run that goes back is shown again from
    there."""
    place = None
    while True:
        answer = client.ask(route, id=run, **({} if place is None else {"after": place})).json()
        yield from answer["lines"]
        if not follow:
            return
        if place is not None and answer["next"] < place:
            say(f"the run went back to {answer['next']}")
        place = answer["next"]
        time.sleep(FOLLOW_S)


def figures(line: dict[str, Any]) -> str:
    """A step in a line."""
    shown = [f"{name} {line[name]:.4g}" for name in SHOWN if isinstance(line.get(name), (int, float))]
    return " · ".join([f"step {line['step']}", *shown, f"config {line.get('config', '?')}"])


def run_view(run: dict[str, Any]) -> str:
    """A run in a line, and the reason in another."""
    actual = run["actual"]
    of = f"/{actual['of']}" if actual.get("of") else ""
    step = f", step {actual['step']}{of}" if "step" in actual else ""
    line = f"{run['run']}: wanted {run['desired']}, is {actual['state']}{step} (config {run['digest']})"
    return f"{line}\n  {run['reason']}" if run["reason"] else line


def runs_view(answer: dict[str, Any]) -> str:
    """All runs, and the supervisors in a line."""
    supervisors = answer["supervisors"]
    silent = ", ".join(name for name, known in supervisors.items() if known["silent"])
    heard = ", ".join(name for name, known in supervisors.items() if not known["silent"])
    said = f"supervisors: {heard or 'none'}" + (f"; silent: {silent}" if silent else "")
    return "\n".join([*map(run_view, answer["runs"]), said])
