"""How the console scripts end: 0 for success, 2 for bad usage, 1 for failure, each fault in one line, no traceback."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from ajet_sdk.errors import AjetError

INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""


def run_command(command: click.Command, prog_name: str) -> NoReturn:
    """Runs a click command as a program; a function of it may return its exit code."""
    try:
        code = command.main(prog_name=prog_name, standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else prog_name
        _end(f"{path}: {error.format_message()} (see '{path} --help')", 2)
    except click.ClickException as error:
        _end(f"{prog_name}: {error.format_message()}", error.exit_code)
    except AjetError as error:
        _end(f"{prog_name}: {error.message}", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush fails again
        sys.exit(1)
    except OSError as error:
        _end(f"{prog_name}: {error}", 1)
    except (KeyboardInterrupt, click.Abort):
        _end(f"{prog_name}: interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _end(line: str, code: int) -> NoReturn:
    click.echo(" ".join(line.split()), err=True)
    sys.exit(code)
