"""Records with tokens, which are written item by item."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from ajet_proxy.core.ledger.events import EpisodeOpened
from ajet_proxy.io.control import answers
from tests.kit.engine_stub import EngineStub
from tests.kit.patience import turns_of_others
from tests.proxy.serving import CHAT, Client, eventually, serving


@pytest.mark.parametrize("tokens", ["1", "timelines"])
async def test_a_record_with_tokens_comes_item_by_item_and_is_whole(
    client: Client, monkeypatch: pytest.MonkeyPatch, tokens: str
) -> None:
    assert (await client.ask("POST", "/e/many/v1/chat/completions", CHAT | {"n": 3})).status == 200
    await client.chat("many", "something else")
    whole = await client.control("GET", "/episodes/many")
    assert "Content-Length" in whole.headers
    plain = whole.json
    monkeypatch.setattr(answers, "PIECE", 1500)
    answer = await client.control("GET", f"/episodes/many?tokens={tokens}")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert list(answer.json) == list(plain)
    lists = ("calls", "timelines")
    assert {name: value for name, value in answer.json.items() if name not in lists} == {
        name: value for name, value in plain.items() if name not in lists
    }
    for told, counted in zip(answer.json["timelines"], plain["timelines"], strict=True):
        assert (told["sample"], told["calls"]) == (counted["sample"], counted["calls"])
        assert (len(told["token_ids"]), sum(told["loss_mask"])) == (counted["tokens"], counted["sampled_tokens"])
    for told, counted in zip(answer.json["calls"], plain["calls"], strict=True):
        assert told["call"] == counted["call"]
        assert len(told.get("token_ids", "")) == (counted["sampled_tokens"] if tokens == "1" else 0)
    assert len(plain["calls"]) == len(plain["timelines"]) == 4


async def test_an_episode_without_calls_has_none_to_write(tmp_path: Path) -> None:
    async with serving(tmp_path, upstream=("http://127.0.0.1:9",)) as client:
        opened = (await client.control("POST", "/episodes", {"task": "t"})).json
        record = (await client.control("GET", f"/episodes/{opened['episode']}?tokens=1")).json
        assert (record["calls"], record["timelines"], record["task"]) == ([], [], "t")


async def test_a_reader_who_leaves_or_reads_nothing_keeps_nobody_waiting(client: Client, tmp_path: Path) -> None:
    wide = CHAT | {"n": 64, "messages": [{"role": "user", "content": "x" * 20_000}]}
    assert (await client.ask("POST", "/e/wide/v1/chat/completions", wide)).status == 200
    url = f"{client.app.url}/ajet/v1/episodes/wide?tokens=1"
    async with client.session.get(url) as idle:
        assert await idle.content.read(1)
        assert (await client.chat("other")).status == 200
    await eventually(lambda: _audited(tmp_path))
    assert (await client.control("GET", "/episodes/wide?tokens=1")).json["state"] == "open"


async def test_a_record_that_cannot_be_made_to_its_end_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(body: object) -> Iterator[bytes]:
        yield from (b"{", b" ")
        raise MemoryError

    monkeypatch.setattr(answers, "in_pieces", fails)
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        await client.chat("ep")
        with pytest.raises(aiohttp.ClientPayloadError):
            await asyncio.wait_for(client.control("GET", "/episodes/ep?tokens=1"), 300)


async def test_a_client_of_http_1_0_knows_the_end_by_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PIECE", 1)
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        await client.chat("ep")
        host, port = client.app.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /ajet/v1/episodes/ep?tokens=1 HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 300)
        writer.close()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["episode"] == "ep"


@pytest.mark.parametrize("piece", [1, 500, 1 << 18])
def test_pieces_together_are_the_json_of_the_whole(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(answers, "PIECE", piece)
    for items in ([], [1], [{"a": [1, 2]}, None, "é" * 400]):
        body = {"first": iter(items), "plain": [1], "last": iter(items)}
        written = list(answers.in_pieces(body))
        assert json.loads(b"".join(written)) == {"first": items, "plain": [1], "last": items}
        assert len(written) == (2 * len(items) + 1 if piece == 1 else 1 if piece > 500 else len(written))


async def _audited(data_dir: Path) -> bool:
    """Tell whether the read has ended: only then is its line written."""
    log = data_dir / "audit.jsonl"
    return log.exists() and any(json.loads(line)["route"] == "get_episode" for line in log.read_text().splitlines())


async def test_looks_wait_for_each_other_and_not_others_for_them(tmp_path: Path) -> None:
    """While one look is made, the next one waits, and what others ask is answered."""
    held, made = threading.Event(), list[str]()

    def slow(name: str) -> Any:
        made.append(name)
        yield held.wait(300)

    class Desk:
        async def decide(self, name: str) -> str:
            return name

        async def shown(self, name: str) -> Any:
            return {"calls": slow(name)}

    async with serving(tmp_path, upstream=("http://127.0.0.1:9",)) as client:
        looks, http = answers.Answers(Desk()), make_mocked_request("GET", "/")
        first, second = (asyncio.create_task(looks.look(http, name)) for name in ("first", "second"))
        await eventually(lambda: made)
        assert (await client.control("POST", "/episodes", {})).status == 200
        assert made == ["first"]
        held.set()
        for task in (first, second):
            assert json.loads(cast(web.Response, await task).body or b"") == {"calls": [True]}
        assert made == ["first", "second"]
        await looks.close(web.Application())


async def test_many_events_at_once_do_not_hold_up_what_is_asked_meanwhile(tmp_path: Path) -> None:
    async with serving(tmp_path, upstream=("http://127.0.0.1:9",)) as client:
        store = client.store
        async with client.session.get(f"{client.app.url}/ajet/v1/events") as events:
            await events.content.readline()
            with turns_of_others() as turns:
                store.post([EpisodeOpened(1.0, f"e{n}", None, None, None, False, 1e9, 1e9) for n in range(500)])
                async for line in events.content:
                    if b'"e499"' in line:
                        break
                assert turns() >= 500
