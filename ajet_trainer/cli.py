"""The `ajet-trainer` command. Heavy imports come after argument parsing, so `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from ajet_sdk.output import run_command
from ajet_trainer.config import SETTINGS, Config, load
from ajet_trainer.live import Live


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ajet", prog_name="ajet-trainer", message="%(prog)s %(version)s")
def cli() -> None:
    """Train a model on the episodes that ajet-proxy records."""


@cli.command(epilog="\b\nKeys of [trainer] in the file:\n" + "\n".join(SETTINGS.describe()))
@click.option("--config", "path", metavar="FILE", required=True, help="TOML file with the tables [trainer] and [verl].")
@click.option("--watch", is_flag=True, help="Take up changes of FILE between two steps, where a run can.")
@click.argument("assignments", nargs=-1, metavar="[KEY=VALUE]...")
def run(path: str, watch: bool, assignments: tuple[str, ...]) -> None:
    """Train a model.

    It continues from the last checkpoint of run_dir, if there is one. A KEY without a dot is one of [trainer]. A KEY
    with dots is verl's.
    """
    def read() -> Config:
        return load(path, assignments, os.environ)

    def say(line: str) -> None:
        click.echo(line, file=out)

    from ajet_trainer.engines.same_model import as_served

    out = sys.stdout  # verl and Ray write into the run folder, what is said here stays on the terminal
    live = Live(Path(path), read, say) if watch else None
    config = as_served(read(), say)
    from ajet_trainer.training import train

    train(config, say, live or (lambda config: config))


@cli.command()
@click.option("--config", "path", metavar="FILE", required=True, help="The file of `run`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.argument("assignments", nargs=-1, metavar="[KEY=VALUE]...")
def doctor(path: str, as_json: bool, assignments: tuple[str, ...]) -> None:
    """Check this host for a run.

    Nothing is loaded. For each fault it says what to do.
    """
    from ajet_sdk.findings import show
    from ajet_trainer.doctor import examine
    from ajet_trainer.engines.same_model import as_served

    show(examine(as_served(load(path, assignments, os.environ), lambda line: None)), json=as_json)


@cli.command()
@click.option("--proxy", metavar="URL", required=True, help="Where ajet-proxy listens.")
@click.option("--allow", metavar="FILE", required=True, help="TOML file that says what may run on this host.")
@click.option("--name", metavar="NAME", help="What this supervisor is called.  [default: the host's name]")
def serve(proxy: str, allow: str, name: str | None) -> None:
    """Keep the runs that are wanted from afar, until SIGTERM.

    The key is in AJET_TRAINER_KEY, of scope trainer. When it ends, its trainers save and end first.
    """
    from ajet_trainer import runs

    runs.serve(proxy, allow, name, os.environ, lambda line: click.echo(line, err=True))


@cli.command("install-service", context_settings={"ignore_unknown_options": True})
@click.option("--user", is_flag=True, help="Use the user's own systemd instead of the machine's.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit and write nothing.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def install_service(user: bool, only_print: bool, arguments: tuple[str, ...]) -> None:
    """Write a systemd unit that keeps runs.

    ARGUMENTS are the options of `serve`. Under the machine's systemd it runs as the user that owns the folder of runs.
    """
    from ajet_trainer import runs

    given = serve.make_context("ajet-trainer serve", list(arguments)).params
    runs.install(given, user=user, only_print=only_print, env=os.environ, say=click.echo)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(1), metavar="N", help="Which step.  [default: the latest]")
@click.option("--episode", metavar="ID", help="Only the rows of this episode.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a row.")
def rows(run_dir: Path, step: int | None, episode: str | None, as_json: bool) -> None:
    """Show what was trained in a step.

    RUN is the run_dir of a training run. Each token is shown with its mask, the logprobs of engine and trainer, its
    advantage and its weight.
    """
    from ajet_sdk.output import say
    from ajet_sdk.settings import ConfigError
    from ajet_trainer import rows_view, trained_rows
    from ajet_trainer.backends import backend
    from ajet_trainer.trained_rows import listed

    kept = trained_rows.steps(run_dir)
    if not kept:
        raise ConfigError(f"no rows are kept in {run_dir}: is it the run_dir of a run that has made a step?")
    if (step := step or kept[-1]) not in kept:
        raise ConfigError(f"the rows of step {step} are not kept; those of {listed(kept)} are")
    found, model = trained_rows.read(run_dir, step)
    wanted = [one for one in found if episode in (None, one.row.episode)]
    if not wanted:
        names = ", ".join(dict.fromkeys(one.row.episode for one in found))
        raise ConfigError(f"episode {episode} is not in step {step}; it trained {names}")
    text = rows_view.reader(model, backend().tokenizers(run_dir))
    if text is None:
        say("ids alone: the model has no tokenizer.json, or the package tokenizers is not installed here")
    show = rows_view.json_line if as_json else rows_view.table
    for one in wanted:
        click.echo(show(step, one, text))


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(1), metavar="N", help="Which checkpoint.  [default: the latest]")
def export(run_dir: Path, folder: Path, step: int | None) -> None:
    """Write the trained model.

    RUN is the run_dir of a training run, or its folder of checkpoints. DIR becomes a Hugging Face folder, with
    safetensors, configuration, tokenizer and chat template. It must not exist, or be empty.
    """
    from ajet_trainer.backends import backend

    backend().export(run_dir, step, folder, click.echo)


@cli.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--step", type=click.IntRange(1), metavar="N", required=True, help="The checkpoint to go on from.")
def rollback(run_dir: Path, step: int) -> None:
    """Go back to a checkpoint.

    RUN is the run_dir of a training run that has ended. Later checkpoints are set aside, in a folder of RUN. The next
    start serves the weights of step N and trains on from there.
    """
    from ajet_sdk.settings import ConfigError
    from ajet_trainer.backends import backend
    from ajet_trainer.run_folder import hold

    try:
        held = hold(run_dir)
    except BlockingIOError:
        raise ConfigError(f"a trainer is at work in {run_dir}: stop it first", param="RUN") from None
    with held:
        earlier = (path.name.removeprefix("set_aside_") for path in run_dir.glob("set_aside_*"))
        place = run_dir / f"set_aside_{1 + max((int(word) for word in earlier if word.isdecimal()), default=0)}"
        later = backend().set_aside(run_dir, step, place)
    aside = f"set aside in {place}: {' and '.join(map(str, later))}" if later else "it is the last"
    click.echo(f"{run_dir} goes on from step {step}; {aside}")


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point: 0 after a run or a stop that was asked for."""
    run_command(
        cli, "ajet-trainer", "the trainer's part is ajet[trainer]", argv=argv, interrupted=("stopped", 0),
        explain=lambda error: f"ajet-trainer: {error}" if isinstance(error, OSError) else None,
    )


if __name__ == "__main__":
    main()
