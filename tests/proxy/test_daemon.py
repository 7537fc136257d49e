"""The composition root: what comes up together, what goes down together."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ajet_proxy.core.ledger.events import EpisodeDiscarded, Event
from ajet_proxy.core.trajectory import drift_rate
from ajet_proxy.daemon import App, issue_key, log_alerts
from ajet_proxy.io.http import keyring
from ajet_proxy.io.storage.store import Store
from ajet_proxy.settings import Config
from ajet_sdk.errors import NotReady
from tests.kit.certificates import Authority
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Client, eventually, identity_holds, serving

SECRET = "a secret of the operator"


async def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = App(Config(listen=f"127.0.0.1:{taken.getsockname()[1]}", data_dir=str(tmp_path)))
        with pytest.raises(OSError):
            await busy.start()
    async with serving(tmp_path) as client:
        assert (await client.status())["episodes"]["opened"] == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
async def test_a_data_directory_that_cannot_be_written_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number), "a name that nobody knows")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=f"data_dir {tmp_path}: {os.strerror(number)}: free .*, make") as raised:
        await App(Config(listen="127.0.0.1:0", data_dir=str(tmp_path))).start()
    assert raised.value.errno == number and raised.value.filename is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("open_s", "lives_s"), [(3600.0, 7 * 86400.0), (9 * 86400.0, 9 * 86400.0)])
async def test_an_episodes_key_lives_for_a_week_or_as_long_as_the_episode_may(
    open_s: float, lives_s: float, tmp_path: Path
) -> None:
    async with serving(tmp_path, wall_timeout=open_s) as client:
        key = (await client.control("POST", "/episodes", {"task": "t"})).json["api_key"]
        claims = keyring.keys(tmp_path).verify(key, 0.0)
        assert claims.expires is not None and abs(claims.expires - time.time() - lives_s) < 60


async def test_a_disk_that_refuses_in_the_middle_of_a_tick_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, refused = Store.post, list[Sequence[Event]]()

    def refusing(store: Store, events: Sequence[Event]) -> None:
        if any(isinstance(event, EpisodeDiscarded) for event in events) and not refused:
            refused.append(events)
            raise NotReady("the journal cannot write: no space", code="journal")
        post(store, events)

    monkeypatch.setattr(Store, "post", refusing)
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), idle_timeout=0.5) as client:
        await client.chat("forgotten")
        await client.until(lambda status: status["episodes"]["discarded"])
        assert refused
        record = (await client.control("GET", "/episodes/forgotten")).json
        assert (record["state"], record["reason"]) == ("discarded", "idle_timeout")
        assert identity_holds(await client.status())


async def test_with_a_certificate_it_speaks_https_off_loopback(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("here")
    app = App(Config(
        listen="0.0.0.0:0", tls_cert=pair.cert, tls_key=pair.key, admin_secret=SECRET, data_dir=str(tmp_path / "d")
    ))
    await app.start()
    try:
        assert app.url.startswith("https://0.0.0.0:")
        url = app.url.replace("0.0.0.0", "127.0.0.1") + "/ajet/v1/status"
        context = ssl.create_default_context(cafile=authority.file)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            for headers, status in (({}, 401), ({"x-api-key": SECRET}, 200)):
                async with session.get(url, headers=headers) as answer:
                    assert answer.status == status
    finally:
        await app.stop()


async def test_an_intercepted_answer_is_finished_before_the_daemon_ends(tmp_path: Path) -> None:
    """And who is intercepted reaches no control route."""
    settings: dict[str, Any] = {"intercept": ("127.0.0.1:0",), "drain_s": 300.0}
    async with EngineStub(delay_s=0.2) as stub, serving(tmp_path, upstream=(stub.url,), **settings) as client:
        body = CHAT | {"stream": True}
        url = "https://api.openai.com/e/late/v1/chat/completions"
        proxy = (await client.status())["intercept"]["url"]
        async with client.session.get("https://api.openai.com/ajet/v1/status", proxy=proxy, ssl=False) as answer:
            assert answer.status == 404
        async with client.session.post(url, json=body, proxy=proxy, ssl=False) as answer:
            first = await answer.content.readany()
            stopping = asyncio.create_task(client.app.stop())
            rest = await answer.content.read()
        await stopping
    assert (first + rest).endswith(b"data: [DONE]\n\n")
    async with serving(tmp_path) as again:
        record = (await again.control("GET", "/episodes/late")).json
        assert [call["complete"] for call in record["calls"]] == [True]


def test_an_issued_key_is_the_proxys_own(tmp_path: Path) -> None:
    key = issue_key(Config(data_dir=str(tmp_path)), "agent", "team", 60.0)
    claims = keyring.keys(tmp_path).verify(key, now=0.0)
    assert (claims.scope, claims.tenant, claims.episode) == ("agent", "team", None)


async def test_a_retry_after_a_restart_takes_out_no_call_whose_client_had_the_end(tmp_path: Path) -> None:
    """Of two equal requests one was answered, and the other one found no daemon."""
    async with EngineStub() as stub:
        for headers in ({}, {"X_Stainless_Retry_Count": "1"}):
            async with serving(tmp_path, upstream=(stub.url,)) as client:
                assert (await client.chat("one", **headers)).status == 200
                calls = (await client.control("GET", "/episodes/one")).json["calls"]
    assert [call["complete"] for call in calls] == [True, True]


async def test_drift_over_the_limit_is_said_in_the_log_the_status_and_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_rate, "LEAST", 3)
    async with EngineStub(drift=True) as stub, serving(tmp_path, upstream=(stub.url,), continuity="off") as client:
        messages = [{"role": "user", "content": "say: go higher, please do"}]
        for _ in range(4):
            assert (await client.status())["alerts"] == []
            body = CHAT | {"messages": messages, "max_tokens": 99}
            answer = await client.ask("POST", "/e/e/v1/chat/completions", body)
            messages += [answer.json["choices"][0]["message"], {"role": "user", "content": "say: go lower, please do"}]
        await client.control("POST", "/episodes/e/rewards", {"value": 1.0})
        (line,) = (await client.status())["alerts"]
        assert line.startswith("model 'stub': 3 of the last 3 turns (100.0%)")
        await eventually(lambda: f"alert: {line}" in caplog.messages)
        page = (await client.ask("GET", "/metrics")).body.decode().splitlines()
        assert {'ajet_broken_timelines_total{model="stub",broken_by="retokenized"} 3', "ajet_alerts 1"} <= set(page)
        record = (await client.control("GET", "/episodes/e")).json
        assert record["drift"] == {"stub": {"turns": 3, "broken_by": {"retokenized": 3}}}


async def test_how_long_requests_were_held_at_the_gate_is_measured(client: Client) -> None:
    await client.ask("POST", "/e/e/v1/chat/completions", CHAT)
    page = (await client.ask("GET", "/metrics")).body.decode().splitlines()
    assert "ajet_gate_wait_seconds_count 2" in page, "the call, and the questions about how it was sampled"


def test_each_alert_is_said_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    on: set[str] = set()
    for alerts in ({}, {"a": "a is 6 %"}, {"a": "a is 7 %"}, {"a": "a is 7 %", "b": "b is 9 %"}, {"b": "b is 9 %"}):
        on = log_alerts(alerts, on)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("WARNING", "alert: a is 6 %"), ("WARNING", "alert: b is 9 %"), ("INFO", "alert over: a")]
