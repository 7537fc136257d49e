"""What is no HTTP is answered all the same, in the contract's shape and without a word of what was sent."""

from __future__ import annotations

import asyncio
import json

import pytest

from ajet_proxy.io.server import Runner
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.front import Front

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def told(front: Front, raw: bytes) -> tuple[int, dict[str, str | None], bytes]:
    """``(status, error, all that came)``; the connection is closed behind it."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split(b" ")[1]), json.loads(body)["error"], answer


@pytest.mark.parametrize(("raw", "code"), [
    (b"GARBAGE sesame\r\n\r\n", "bad_http"), (b"GET / HTTP/sesame\r\n\r\n", "bad_http"),
    (b"\x16\x03\x01\x02sesame\r\n\r\n", "bad_http"), (HEAD + b"no colon sesame\r\n\r\n", "bad_http"),
    (HEAD + b"content-length: sesame\r\n\r\n", "bad_http"),
    (HEAD + b"x-key: sesame" + b"a" * 10_000 + b"\r\n\r\n", "header_too_large"),
    (b"GET /sesame" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n", "header_too_large"),
])  # fmt: skip
async def test_what_is_no_http_is_a_400_in_the_shape_of_errors(raw: bytes, code: str) -> None:
    async with EngineStub() as stub, Front(stub.url) as front:
        status, error, answer = await told(front, raw)
        assert (status, error["code"], error["type"]) == (400, code, "invalid_request_error")
        assert set(error) == {"message", "type", "code", "param"}
        assert b"sesame" not in answer
        assert stub.requests == []


async def test_a_defect_of_the_server_itself_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("sesame")

    async with EngineStub() as stub, Front(stub.url) as front:
        assert isinstance(front._runner, Runner)
        monkeypatch.setattr(front._runner.server, "request_handler", fails)
        status, error, answer = await told(front, HEAD + b"\r\n")
        assert (status, error["code"]) == (500, "internal_error")
        assert b"sesame" not in answer
