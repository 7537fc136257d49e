"""Writes for commands, to standard streams that may be closed, full, or of an encoding that holds few characters; and
ends them.

Invariant: no episode suffers for what cannot be shown of it. A user's fault always ends in one line on standard error,
and never in a traceback: exit 2 for bad usage, 1 for failure.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import click

from ajet_sdk.errors import AjetError

if TYPE_CHECKING:
    from ajet_sdk.play.blocking import Episode

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as a shell reports it."""


class OnceCommand(click.Command):
    """A command that refuses a second value for an option that takes one, since it is unclear which is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in order:
            if not isinstance(option, click.Option) or option.multiple or option.is_flag or order.count(option) == 1:
                continue
            name, names = max(option.opts, key=len), [one for other in self.params for one in other.opts]
            several = f": {name}s takes several" if f"{name}s" in names else ""
            raise click.UsageError(f"{name} is given {order.count(option)} times, and takes one value{several}", ctx)
        return super().parse_args(ctx, args)


class OnceGroup(click.Group):
    """Its commands are of this kind."""

    command_class = OnceCommand


def run_command(
    command: click.Command, name: str, part: str, *, argv: Sequence[str] | None = None,
    explain: Callable[[Exception], str | None] = lambda error: None, interrupted: tuple[str, int] = ("", INTERRUPTED),
) -> NoReturn:
    """Runs `command` and ends the process. `explain` has the first word about a fault; `part` says what to install if a
    module is missing."""
    open_streams()
    line: str | None = None
    try:
        code = command.main(argv, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush fails again
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort) as error:
        if isinstance(error.__cause__, EOFError):
            raise  # click takes the end of a file for that of a terminal, which we never ask
        line, code = interrupted
    except Exception as error:
        line, code = explain(error) or _line_of(error, name, part), getattr(error, "exit_code", 1)
        if line is None:
            raise
    if line:
        say(" ".join(line.split()))
    sys.exit(code if isinstance(code, int) else 0)


def _line_of(error: Exception, name: str, part: str) -> str | None:
    """The line for a fault that every command may have; None for a bug of ours."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else name
        return f"{path}: {error.format_message()} (see '{path} --help')"
    if isinstance(error, click.ClickException):
        return f"{name}: {error.format_message()}"
    if isinstance(error, AjetError):
        return f"{name}: {error.message}"
    if isinstance(error, ModuleNotFoundError):
        return f"{name}: {error.name} is not installed here: {part}"
    return None


def open_streams() -> None:
    """Makes a standard stream that was closed read and write nothing. Standard output then shows ``?`` for what its
    encoding does not hold (standard error shows that by its number)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def say(line: str) -> None:
    """Writes a line to standard error, if anything can be written there."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Copies:
    """Copies programs' output to ours, line by line; if `named`, with the episode before each line.

    What cannot be written is lost, and `lost` says why. If the reader has left, nothing counts as lost.
    """

    def __init__(self, *, named: bool) -> None:
        self.at_line_start = True
        self.lost: OSError | None = None
        self._named = named
        self._writing = threading.Lock()

    def __call__(self, episode: Episode, stream: str, line: bytes) -> None:
        if self._named:
            line = f"[{episode.id}] ".encode() + line.rstrip(b"\r\n") + b"\n"
        self._write(stream, line)

    def text(self, line: str) -> None:
        """A line of ours between theirs, on standard output."""
        data = f"{line}\n".encode(sys.stdout.encoding or "utf-8", "replace")
        self._write("stdout", data if self.at_line_start else b"\n" + data)

    def _write(self, stream: str, line: bytes) -> None:
        out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        with self._writing:
            self.at_line_start = line.endswith(b"\n")
            try:
                out.write(line)
                out.flush()
            except BrokenPipeError:  # who reads no more of it may still want the episodes
                pass
            except OSError as error:
                self.lost = error
