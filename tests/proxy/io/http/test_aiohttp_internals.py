"""Everything that `aiohttp_internals` uses beyond aiohttp's public interface is there, in the shape that it was tried
with."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest
import tomllib
from aiohttp import web
from aiohttp.connector import Connection
from packaging.specifiers import SpecifierSet

from ajet_proxy.io.http.aiohttp_internals import TRIED
from tests.kit.source import ROOT

SHAPES: dict[Callable[..., Any], str] = {
    web.RequestHandler.handle_error: "self request status exc message",
    web.RequestHandler.connection_made: "self transport",
    web.RequestHandler.connection_lost: "self exc",
    web.RequestHandler.pause_writing: "self",
    web.RequestHandler.resume_writing: "self",
    web.RequestHandler.force_close: "self",
    aiohttp.TCPConnector.connect: "self req traces timeout",
    aiohttp.StreamReader.set_exception: "self exc exc_cause",
    aiohttp.StreamReader._read_nowait: "self n",
}


def test_the_installed_aiohttp_is_one_that_was_tried() -> None:
    installed = version("aiohttp")
    assert installed in SpecifierSet(TRIED), (
        f"aiohttp {installed} is installed, and aiohttp_internals was tried with {TRIED}: run the other tests of this "
        "file and of tests/proxy/io, then change TRIED and pyproject.toml together"
    )


def test_no_other_version_is_asked_for() -> None:
    with open(ROOT / "pyproject.toml", "rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    asked = {line.removeprefix("aiohttp") for lines in extras.values() for line in lines if line.startswith("aiohttp")}
    assert asked == {TRIED}


@pytest.mark.parametrize("internal", SHAPES, ids=lambda internal: internal.__qualname__)
def test_each_internal_takes_what_it_took(internal: Callable[..., Any]) -> None:
    takes = " ".join(inspect.signature(internal).parameters)
    assert takes == SHAPES[internal], f"aiohttp has changed {internal.__qualname__}: it takes ({takes})"


async def test_a_server_keeps_how_its_connections_are_made() -> None:
    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    server = web.Server(answer, request_factory=None, handler_cancellation=True, max_line_size=99)
    assert server._kwargs == {"max_line_size": 99}, "aiohttp has changed Server._kwargs"
    assert server._loop is not None
    connection = server()
    assert connection._request_handler is answer, "aiohttp has changed RequestHandler._request_handler"
    assert connection._request_count == 0, "aiohttp has changed RequestHandler._request_count"
    assert connection._loop is server._loop and connection.transport is None


async def test_a_runner_hands_its_server_to_those_that_listen() -> None:
    assert isinstance(web.BaseRunner.server, property), "aiohttp has changed BaseRunner.server"
    runner = web.AppRunner(web.Application())
    await runner.setup()
    assert runner._server is runner.server is not None, "aiohttp has changed BaseRunner._server"
    await runner.cleanup()


async def test_a_reader_keeps_what_it_has_when_it_breaks_off() -> None:
    reader = aiohttp.StreamReader(_Unread(), 2**16, loop=asyncio.get_running_loop())  # type: ignore[arg-type]
    reader.feed_data(b"kept")
    reader.set_exception(ValueError("broken"))
    assert reader._read_nowait(-1) == b"kept", "aiohttp has changed StreamReader._read_nowait"


class _Unread:
    """Stands for the protocol of a reader that nobody pauses."""

    connected = True

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Nothing was paused."""


def test_an_answer_tells_its_connection() -> None:
    for owner, name in ((aiohttp.ClientResponse, "connection"), (Connection, "transport")):
        assert isinstance(inspect.getattr_static(owner, name), property), f"aiohttp has changed {owner}.{name}"
