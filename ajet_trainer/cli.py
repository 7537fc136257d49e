"""The `ajet-trainer` command. Heavy imports come after argument parsing, so `--help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from ajet_sdk.output import run_command
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
    """Train a model on the episodes that ajet-proxy records."""


@cli.command(epilog="\b\nKeys of [trainer] in the file:\n" + "\n".join(SETTINGS.describe()))
@click.option("--config", "path", metavar="FILE", required=True, help="TOML file with the tables [trainer] and [verl].")
@click.argument("assignments", nargs=-1, metavar="[KEY=VALUE]...")
def run(path: str, assignments: tuple[str, ...]) -> None:
    """Train a model.

    It continues from the last checkpoint of run_dir, if there is one. A KEY without a dot is one of [trainer]. A KEY
    with dots is verl's.
    """
    config = load(path, assignments, os.environ)
    from ajet_trainer.verl_backend.main import run as train

    out = sys.stdout  # verl and Ray write into the run folder, what is said here stays on the terminal
    train(config, lambda line: click.echo(line, file=out))


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point: 0 after a run or a stop that was asked for."""
    run_command(cli, "ajet-trainer", "the trainer's part is ajet[trainer]", argv=argv, interrupted=("stopped", 0))
