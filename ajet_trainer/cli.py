"""The `ajet-trainer` command. Heavy imports come after argument parsing, so `--help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ajet_sdk.errors import AjetError
from ajet_sdk.output import open_streams
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import SETTINGS, load


class Commands(click.Group):
    """Knows `quickstart` by name and imports it only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["run", "quickstart"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "quickstart":
            from ajet_trainer.quickstart.cli import quickstart

            return quickstart
        return super().get_command(ctx, name)


@click.group(cls=Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ajet", prog_name="ajet-trainer", message="%(prog)s %(version)s")
def cli() -> None:
    """Trains a model on the episodes that ajet-proxy collects."""


@cli.command(epilog="\b\nKeys of [trainer] in the file:\n" + "\n".join(SETTINGS.describe()))
@click.option("--config", "path", metavar="FILE", required=True, help="TOML file with the tables [trainer] and [verl].")
@click.argument("assignments", nargs=-1, metavar="[KEY=VALUE]...")
def run(path: str, assignments: tuple[str, ...]) -> None:
    """Trains until told otherwise; goes on from the last checkpoint where there is one.

    A KEY without a dot is one of [trainer], a KEY with dots is one of verl's own.
    """
    config = load(path, assignments, os.environ)
    from ajet_trainer.verl_backend.main import run as train

    out = sys.stdout  # verl and Ray write into the run folder, what is said here stays on the terminal
    train(config, lambda line: click.echo(line, file=out))


def main(argv: list[str] | None = None) -> None:
    """Entry point: 0 after a run or a stop that was asked for, 2 for bad usage, 1 for failure; never a traceback for a
    mistake of the user's."""
    open_streams()
    sys.exit(_status(argv))


def _status(argv: list[str] | None) -> int:
    try:
        status: Any = cli.main(argv, prog_name="ajet-trainer", standalone_mode=False)
        return int(status or 0)
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "ajet-trainer"
        click.echo(f"ajet-trainer: {' '.join(error.format_message().split())} (see '{path} --help')", err=True)
        return error.exit_code
    except ConfigError as error:
        click.echo(f"ajet-trainer: {error.message}", err=True)
        return 2
    except AjetError as error:
        click.echo(f"ajet-trainer: {error.message}", err=True)
        return 1
    except ModuleNotFoundError as error:
        click.echo(f"ajet-trainer: {error.name} is not installed here: the trainer's part is ajet[trainer]", err=True)
        return 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return 0
