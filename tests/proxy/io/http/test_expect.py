"""`Expect: 100-continue`: a body is asked for when it is about to be read, and of nobody who is refused before that."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.answering import connected
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.http.test_body import GOOD
from tests.proxy.serving import serving

SECRET = "a secret of the operator"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_KEY = "Bearer ajet-forged.key"


@contextlib.asynccontextmanager
async def asked(
    url: str, path: str, *, method: str = "POST", key: str = f"Bearer {SECRET}", length: int = 4,
    expect: str = "100-continue", version: str = "1.1",
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which the head of a request was sent, and nothing of its body."""
    head = (
        f"{method} {path} HTTP/{version}", "Host: localhost", f"Authorization: {key}", "Content-Type: application/json",
        f"Content-Length: {length}", f"Expect: {expect}",
    )
    async with connected(url, ("\r\n".join(head) + "\r\n\r\n").encode()) as connection, asyncio.timeout(300):
        yield connection


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status of the next answer, and its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(head.split()[1]), head


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("path", "key", "length", "status"), [
    *((path, BAD_KEY, 4, 401) for path in GOOD),
    *((path, f"Bearer {SECRET}", 2000, 413) for path in GOOD),
    (f"/e/x/v1/chat/completions?key=ajet-{'k' * 16}.{'s' * 43}", f"Bearer {SECRET}", 4, 400),
    ("/collective_rpc", f"Bearer {SECRET}", 4, 404), ("/ajet/v1/gate/close", BAD_KEY, 4, 401),
])  # fmt: skip
async def test_who_is_refused_is_not_asked_for_the_body(
    workers: int, path: str, key: str, length: int, status: int, tmp_path: Path
) -> None:
    async with (
        serving(tmp_path, admin_secret=SECRET, workers=workers, max_body=1000) as client,
        asked(client.app.url, path, key=key, length=length) as (reader, _),
    ):
        said, head = await answered(reader)
        assert said == status
        assert b"connection: close" in head.lower(), "what the client sends next may be a body or a request"


@pytest.mark.parametrize("workers", [1, 2])
async def test_for_more_than_a_control_request_may_hold_nobody_is_asked(workers: int, tmp_path: Path) -> None:
    async with (
        serving(tmp_path, admin_secret=SECRET, workers=workers) as client,
        asked(client.app.url, "/ajet/v1/policy", length=(1 << 20) + 1) as (reader, _),
    ):
        assert (await answered(reader))[0] == 413


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/ajet/v1/status", 200), ("GET", "/ajet/", 200), ("GET", "/ajet", 308), ("GET", "/metrics", 200),
    ("POST", "/ajet/v1/nothing", 404), ("POST", "/metrics", 404),
])  # fmt: skip
async def test_what_needs_no_body_is_answered_without_one(method: str, path: str, status: int, tmp_path: Path) -> None:
    async with (
        serving(tmp_path, admin_secret=SECRET) as client,
        asked(client.app.url, path, method=method) as (reader, _),
    ):
        assert (await answered(reader))[0] == status


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("path", GOOD)
async def test_a_body_that_is_read_is_asked_for_once_and_the_connection_goes_on(
    workers: int, path: str, tmp_path: Path
) -> None:
    body = json.dumps(GOOD[path]).encode()
    async with (
        EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), admin_secret=SECRET, workers=workers) as client,
        asked(client.app.url, path, length=len(body)) as (reader, writer),
    ):
        assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
        writer.write(body)
        assert (await answered(reader))[0] == 200
        writer.write(f"GET /ajet/v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode())
        assert (await answered(reader))[0] == 200


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(("expect", "version"), [("200-ok", "1.1"), ("100-continue", "1.0")])
async def test_what_else_is_expected_is_passed_over(path: str, expect: str, version: str, tmp_path: Path) -> None:
    """On control routes too, where aiohttp would answer 417 and repeat what was sent."""
    body = json.dumps(GOOD[path]).encode()
    async with (
        EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), admin_secret=SECRET) as client,
        asked(client.app.url, path, length=len(body), expect=expect, version=version) as (reader, writer),
    ):
        writer.write(body)
        assert (await answered(reader))[0] == 200
