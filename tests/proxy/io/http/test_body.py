"""Bodies: nothing larger than allowed is ever held, however it is packed; nothing at all of one who has no key; and
nobody may dribble for ever."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import brotli
import pytest
import zstandard

from ajet_proxy.core.protocol import request
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.io.capture import front as module
from ajet_proxy.io.control import desk
from ajet_proxy.io.storage.limits import resident_bytes
from tests.kit.answering import connected
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Client, serving

ROUTES = ("/v1/chat/completions", "/v1/embeddings", "/ajet/v1/episodes")
PACKERS: dict[str, Any] = {
    "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstandard.compress
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "gzip, gzip", "zstd, gzip", "gzip, zstd, br"])
async def test_a_bomb_goes_off_at_the_limit_and_not_behind_it(path: str, encoding: str, tmp_path: Path) -> None:
    bomb = b"{" + b" " * (64 << 20)
    for coding in encoding.split(", "):
        bomb = PACKERS[coding](bomb)
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), max_body=1 << 20) as client:
        before = resident_bytes()
        answer = await client.ask("POST", path, bomb, Content_Encoding=encoding, Content_Type="application/json")
        assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
        assert resident_bytes() - before < 32 << 20
        assert stub.requests == []
        packed = gzip.compress(json.dumps({"task": "t"}).encode())
        opened = await client.ask("POST", "/ajet/v1/episodes", packed, Content_Encoding="gzip")
        assert opened.status == 200


GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT, "/v1/embeddings": {"model": "stub", "input": "x"}, "/ajet/v1/episodes": {"task": "t"},
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("encoding", PACKERS)
async def test_a_packed_body_that_ends_in_the_middle_is_refused(encoding: str, workers: int, tmp_path: Path) -> None:
    """Although what came of it is a whole request: the space behind it is cut off."""
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), workers=workers) as client:
        for path, asked in GOOD.items():
            packed = PACKERS[encoding](json.dumps(asked).encode() + b" " * 10)
            told = {"Content_Encoding": encoding, "Content_Type": "application/json"}
            for cut in (packed[:-1], packed + b"x"):
                answer = await client.ask("POST", path, cut, **told)
                assert (answer.status, answer.json["error"]["code"]) == (400, "bad_body")
                assert f"its {encoding} " in answer.json["error"]["message"]
            assert not stub.requests and not (await client.status())["episodes"]["opened"]
        for path, asked in GOOD.items():
            packed = PACKERS[encoding](json.dumps(asked).encode())
            assert (await client.ask("POST", path, packed, **told)).status == 200


async def test_what_is_packed_is_not_longer_than_a_body_may_be(tmp_path: Path) -> None:
    """It may stand for nothing, and come in chunks that tell no length."""
    async def members() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield gzip.compress(b"") * 10

    async with serving(tmp_path, max_body=1000) as client:
        headers = {"Content-Encoding": "gzip"}
        url = f"{client.app.url}/v1/embeddings"
        async with client.session.post(url, data=members(), headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_dribbles_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.4)
    monkeypatch.setattr(desk, "PATIENCE_S", 0.4)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode()
    async with serving(tmp_path) as client, connected(client.app.url, head) as (reader, writer):
        answering = asyncio.create_task(reader.readuntil(b"}}"))
        while not answering.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
        answer = await answering
        assert answer.startswith(b"HTTP/1.1 400")
        assert b'"slow_body"' in answer


USER = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def at_most_10_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 10)


@pytest.mark.usefixtures("at_most_10_messages")
@pytest.mark.parametrize(("path", "asked"), [
    ("/v1/chat/completions", {"messages": [USER] * 11}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 20}, USER]}),
    ("/v1/responses", {"input": [USER] * 11}),
    ("/v1/messages", {"messages": [USER] * 11, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [[1]] * 50}),
])  # fmt: skip
async def test_a_request_of_too_many_messages_is_refused(
    path: str, asked: dict[str, Any], client: Client, stub: EngineStub
) -> None:
    """A body that is looked at message by message would hold up everybody else."""
    answer = await client.ask("POST", path, {"model": "stub", **asked})
    assert answer.status == 413
    shape = {"type", "message"} if path == "/v1/messages" else {"type", "message", "code", "param"}
    assert set(answer.json["error"]) == shape and "is too large to be read" in answer.json["error"]["message"]
    assert not stub.requests and not (await client.status())["episodes"]["opened"]
    fewer = {name: value[:10] if isinstance(value, list) else value for name, value in asked.items()}
    if path != "/v1/completions" and "tool_calls" not in str(asked):
        assert (await client.ask("POST", path, {"model": "stub", **fewer})).status == 200


MANY = {"messages": [USER], "metadata": {str(name): 0 for name in range(300)}}


@pytest.mark.usefixtures("at_most_10_messages")
@pytest.mark.parametrize("path", [*CAPTURED, "/v1/embeddings"])
async def test_a_body_of_too_many_names_is_refused_before_any_of_it_is_made(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of them would hold up everybody for seconds."""
    def unread(*_: Any, **__: Any) -> None:
        raise AssertionError("it was read")

    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        monkeypatch.setattr(request, "load", unread)
        answer = await client.ask("POST", path, {"model": "stub", **MANY})
        assert answer.status == 413 and "more than 300 names" in answer.json["error"]["message"]
        assert not stub.requests


@pytest.mark.usefixtures("at_most_10_messages")
async def test_arguments_of_too_many_names_are_not_read(tmp_path: Path) -> None:
    arguments = json.dumps({str(name): 0 for name in range(300)})
    calls = [CALL | {"function": {"name": "f", "arguments": arguments}}]
    said = {"messages": [{"role": "assistant", "tool_calls": calls}, USER]}
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        answer = await client.ask("POST", "/v1/chat/completions", {"model": "stub", **said})
        assert (answer.status, answer.json["error"]["code"]) == (413, "too_many_messages")


@pytest.mark.parametrize("workers", [1, 2])
async def test_nothing_is_read_of_one_who_has_no_key(workers: int, tmp_path: Path) -> None:
    """Its body would lie in memory until it is there as a whole: so the answer comes before that."""
    async with serving(tmp_path, admin_secret="a secret of the operator", workers=workers) as client:
        for path in ROUTES:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ajet-forged.key\r\n"
            async with connected(client.app.url, f"{head}Content-Length: 1000\r\n\r\n{{".encode()) as (reader, _):
                answer = await asyncio.wait_for(reader.readuntil(b"}}"), 300)
                assert answer.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("encoding", ["zstd", "x-gzip", "gzip, gzip", "br, zstd", "identity", "gzip, identity"])
@pytest.mark.parametrize("path", GOOD)
async def test_every_packed_body_is_read_and_goes_on_as_it_is(path: str, encoding: str, tmp_path: Path) -> None:
    body = json.dumps(GOOD[path]).encode()
    for coding in encoding.replace("x-", "").split(", "):
        body = body if coding == "identity" else PACKERS[coding](body)
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        answer = await client.ask("POST", path, body, Content_Encoding=encoding, Content_Type="application/json")
        assert answer.status == 200
        for asked in stub.requests:
            assert "content-encoding" not in asked.headers and asked.body.items() >= GOOD[path].items()


@pytest.mark.parametrize("path", [*GOOD, "/v1/messages"])
@pytest.mark.parametrize("encoding", ["compress", "gzip, x", "gzip, gzip, gzip, gzip, gzip"])
async def test_a_body_that_is_packed_otherwise_is_a_415_that_says_what_is_read(
    path: str, encoding: str, client: Client, stub: EngineStub
) -> None:
    answer = await client.ask("POST", path, b"{}", Content_Encoding=encoding, Content_Type="application/json")
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate, br, zstd")
    assert answer.json["error"]["type"] == "invalid_request_error" and stub.requests == []
