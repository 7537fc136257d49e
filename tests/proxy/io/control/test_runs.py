"""Runs over HTTP: a verdict is waited for, a supervisor is told at once, and what is wanted survives a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

from ajet_proxy.io.control import runs as module
from tests.proxy.serving import Client, eventually, serving

CONFIG = {"trainer": {"model": "m"}}
PUT = {"config": CONFIG, "desired": "running"}


class Speaking:
    """A supervisor that says good things of every configuration, and that its runs run."""

    def __init__(self, client: Client, **verdict: Any) -> None:
        self.client, self.verdict = client, verdict or {"digest": "d"}
        self.known, self.wait_s = "", 5.0
        self.runs: dict[str, Any] = {}
        self.told: list[dict[str, Any]] = []

    async def speak(self, verdicts: Any = None) -> dict[str, Any]:
        body = {"name": "s", "instance": "i", "runs": self.runs, "known": self.known, "wait_s": self.wait_s,
                "verdicts": verdicts or {}}  # fmt: skip
        answer = await self.client.control("POST", "/supervisor", body)
        assert answer.status == 200, answer.json
        told: dict[str, Any] = answer.json
        self.told.append(told)
        self.known = told["known"]
        return told

    async def loop(self) -> None:
        verdicts: dict[str, Any] = {}
        while True:
            told = await self.speak(verdicts)
            verdicts = dict.fromkeys(told["checks"], self.verdict)

    @contextlib.asynccontextmanager
    async def speaking(self) -> AsyncIterator[None]:
        """It speaks again and again, and has been heard."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.loop())
            await self.until(lambda told: True)
            yield
            task.cancel()

    async def until(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        await eventually(lambda: self.told and reached(self.told[-1]))


async def test_a_run_is_stored_once_its_supervisor_has_looked_at_it(client: Client) -> None:
    supervisor = Speaking(client)
    async with supervisor.speaking():
        put = await client.control("PUT", "/runs/r", PUT)
        await supervisor.until(lambda told: "r" in told["runs"])
    assert (put.status, put.json["digest"], put.json["desired"]) == (200, "d", "running")
    assert [list(told["checks"].values()) for told in supervisor.told if told["checks"]] == [
        [{"run": "r", "config": {"trainer.model": "m"}}]
    ]


async def test_a_configuration_that_cannot_run_is_refused_with_the_supervisor_s_words(client: Client) -> None:
    supervisor = Speaking(client, error="trainer.model must be one of none", param="trainer.model")
    async with supervisor.speaking():
        put = await client.control("PUT", "/runs/r", PUT)
    assert (put.status, put.json["error"]["code"], put.json["error"]["param"]) == (
        400, "config_refused", "trainer.model",
    )
    assert (await client.control("GET", "/runs/r")).status == 404


async def test_without_a_verdict_nothing_is_stored(client: Client) -> None:
    supervisor = Speaking(client)
    supervisor.wait_s = 0.0
    await supervisor.speak()
    with mock.patch.object(module, "VERDICT_S", 0.05):
        put = await client.control("PUT", "/runs/r", PUT)
    assert (put.status, put.json["error"]["code"]) == (503, "no_verdict")
    assert int(put.headers["Retry-After"]) >= 1
    assert (await supervisor.speak())["checks"] == {}
    assert (await client.control("GET", "/runs")).json["runs"] == []


async def test_what_is_wanted_survives_a_restart_and_what_was_said_does_not(tmp_path: Path) -> None:
    for kept in (False, True):
        async with serving(tmp_path / "data") as client:
            supervisor = Speaking(client)
            async with supervisor.speaking():
                if not kept:
                    assert (await client.control("PUT", "/runs/r", PUT)).status == 200
                    supervisor.runs = {"r": {"state": "running", "starts": 1, "config": "d"}}
                    await supervisor.until(lambda told: told["runs"] != {})
            if kept:
                shown = (await client.control("GET", "/runs/r")).json
                assert (shown["desired"], shown["config"], shown["starts"]) == ("running", CONFIG, 1)
                assert shown["actual"] == {"state": "unknown"}


async def test_a_daemon_that_stops_waits_for_no_supervisor(tmp_path: Path) -> None:
    until = module.Bell.until
    with (
        mock.patch.object(module, "MAX_POLL_S", 600.0),
        mock.patch.object(module.Bell, "until", autospec=True, side_effect=until) as waits,
    ):
        async with serving(tmp_path / "data") as client:
            supervisor = Speaking(client)
            supervisor.wait_s = 600.0
            await supervisor.speak()
            waiting = asyncio.create_task(supervisor.speak())
            await eventually(lambda: waits.call_count == 2)
            assert not waiting.done()
            await client.app.stop()
            assert (await waiting)["runs"] == {}
