"""Helpers of the commands of ``ajet``: checks of words, the proxy option, and the client.

Only click is loaded here; the rest of the SDK is loaded by the command that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ajet_sdk.errors import AjetError

if TYPE_CHECKING:
    from ajet_sdk.blocking import Client

F = TypeVar("F", bound=Callable[..., Any])
PROXY_HELP = "The proxy's address.  [default: AJET_PROXY_URL, else http://127.0.0.1:8484]"
LOOK_S = 5.0
"""A command that only looks waits so long for a proxy; one that changes something waits for `DEADLINE_S`."""


@contextmanager
def usage() -> Iterator[None]:
    """Turns an error of the values that were given into bad usage, before anything is asked of a proxy."""
    try:
        yield
    except AjetError as error:
        raise click.UsageError(error.message) from None


def episode_id(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuses a word that cannot be the name of an episode."""
    from ajet_sdk.bodies import check_episode

    with usage():
        return None if value is None else check_episode(value)


def text(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuses bytes that are not text in this locale."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("it holds bytes that are no text") from None
    return value


def label(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Refuses a word that is too long, or too short, to describe a client."""
    from ajet_sdk.limits import MAX_CLIENT_TEXT

    if value is not None and not 1 <= len(value) <= MAX_CLIENT_TEXT:
        raise click.BadParameter(f"it must have 1 to {MAX_CLIENT_TEXT} characters")
    return text(context, option, value)


def proxy_option(command: F) -> F:
    return click.option("--proxy", metavar="URL", help=PROXY_HELP)(command)


def client_for(proxy: str | None, deadline: float | None = None) -> Client:
    """A client for a command, which asks for up to `deadline` seconds. What is wrong with its address is bad usage."""
    from ajet_sdk.blocking import Client
    from ajet_sdk.client import DEADLINE_S

    with usage():
        return Client(proxy, deadline=DEADLINE_S if deadline is None else deadline)


def show_json_or(as_json: bool, answer: Any, view: Callable[[Any], str]) -> None:
    """Shows an answer as JSON, or as its `view`."""
    import json

    click.echo(json.dumps(answer, indent=2) if as_json else view(answer))
