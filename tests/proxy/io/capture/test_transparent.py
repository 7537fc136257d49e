"""Passing on, byte for byte: engine and client hear through the front what they would have heard directly.

Client and engine are sockets here, and what they write is compared as bytes. Only what HTTP gives to one hop alone may
differ: ``Host``, ``Connection``, how a body is framed, and that ``Via`` names the proxy to the engine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from ajet_proxy.core.ledger.events import CallLost, Event
from tests.kit.answering import connected, listening
from tests.proxy.io.front import Front

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa9.bin"\r\n\r\n\x00\xff\r\n--b--\r\n'
)
FRAMING = {b"host", b"connection", b"transfer-encoding", b"content-length"}
VIA = b"Via: 1.1 ajet_proxy"
HEALTH = b"GET /health HTTP/1.1"
"""An engine that is slow to answer is asked whether it is well, which is no client's request."""
ENDS = ("", "/e/session-1")
"""The paths before ``/v1`` of base URLs."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A request or an answer: its first line, its headers in their order, less those of the hop, and its body."""

    line: bytes
    headers: list[bytes]
    body: bytes

    @classmethod
    async def read(cls, reader: asyncio.StreamReader, *, bodyless: bool = False) -> Heard:
        line, *headers = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (header.partition(b":") for header in headers)}
        body = b""
        if bodyless:
            pass
        elif fields.get(b"transfer-encoding") == b"chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                body += (await reader.readexactly(size + 2))[:-2]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        else:
            body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        kept = [one.rstrip() for one in headers if one.partition(b":")[0].lower() not in FRAMING and one != VIA]
        return cls(line, kept, body)


@dataclass(slots=True)
class Wire:
    """A front and, behind it, an engine that says `answer` to everything and keeps what it `heard`; what happened to
    episodes is in `events`."""

    front: str
    engine: str
    answer: bytes
    heard: list[Heard]
    events: list[Event]

    async def ask(self, url: str, request: bytes, *, bodyless: bool = False) -> Heard:
        """The answer to `request` when it is written to `url`."""
        async with connected(url, request) as (reader, _), asyncio.timeout(300):
            return await Heard.read(reader, bodyless=bodyless)

    async def both(self, request: bytes, prefix: str, *, bodyless: bool = False) -> tuple[Heard, Heard]:
        """The answers to `request`, whose path begins with ``/v1``, directly and through the front under `prefix`."""
        direct = await self.ask(self.engine, request, bodyless=bodyless)
        proxied = await self.ask(self.front, request.replace(b" /v1", f" {prefix}/v1".encode(), 1), bodyless=bodyless)
        return direct, proxied


@asynccontextmanager
async def wire(answer: bytes = OK, admin_secret: str | None = None) -> AsyncIterator[Wire]:
    made = Wire("", "", answer, [], [])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heard = await Heard.read(reader)
                if heard.line != HEALTH:
                    made.heard.append(heard)
                writer.write(made.answer.replace(b"ENGINE", made.engine.encode()))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with listening(serve) as made.engine, Front(made.engine, admin_secret=admin_secret) as front:
        made.front, made.events = front.url, front.store.durable
        yield made


def request(line: bytes, *headers: bytes, body: bytes | None = None) -> bytes:
    length = [] if body is None else [b"Content-Length: %d" % len(body)]
    return b"\r\n".join([line + b" HTTP/1.1", b"Host: x", *headers, *length, b"", body or b""])


REQUESTS = {
    "get": request(b"GET /v1/files"),
    "query": request(b"GET /v1/files?after=a%2Fb&x[]=1&x[]=2&e=%20+%E9&empty=&flag"),
    "path": request(b"GET /v1/models/ft:gpt%3Aorg%20x@1;v=2,3/~"),
    "slash in a name": request(b"GET /v1/models/org%2Fname"),
    "slash at the end": request(b"GET /v1/models/"),
    "delete": request(b"DELETE /v1/files/file-1"),
    "delete with a body": request(b"DELETE /v1/x", b"Content-Type: application/json", body=b'{"a": 1}'),
    "get with a body": request(b"GET /v1/x", b"Content-Type: application/json", body=b'{"a": 1}'),
    "patch": request(b"PATCH /v1/x", b"Content-Type: application/merge-patch+json", body=b"{}"),
    "put of bytes": request(b"PUT /v1/x", b"Content-Type: application/octet-stream", body=bytes(range(256)) * 300),
    "no type": request(b"POST /v1/x", body=b"plain"),
    "empty": request(b"POST /v1/files/batch-1/cancel", body=b""),
    "form": request(b"POST /v1/files", b'Content-Type: multipart/form-data; boundary="b"', body=FORM),
    "urlencoded": request(b"POST /v1/x", b"Content-Type: application/x-www-form-urlencoded", body=b"a=1&a=%C3%A9"),
    "options": request(b"OPTIONS /v1/models", b"Access-Control-Request-Method: POST"),
    "own method": request(b"PURGE /v1/x"),
    "headers": request(
        b"POST /v1/responses/compact", b"authorization: Bearer sk-proj_A.b/c+d==", b"OpenAI-Organization: org-1",
        b"OPENAI-PROJECT: p", b"OpenAI-Beta: assistants=v2", b"OpenAI-Beta: realtime=v1", b"Idempotency-Key: k-1",
        b"x-request-id: r", b"X-Stainless-Raw-Response: stream", b"Accept: text/event-stream",
        b"Accept-Encoding: gzip, br, zstd", b"Cookie: a=1; b=2", b"User-Agent: \xc3\xa9/1", b"X-Empty:",
        b"If-None-Match: \"e\"", b"Range: bytes=0-9", body=b"{}",
    ),
    "basic": request(b"GET /v1/models", b"Authorization: Basic dTpw"),
    "api-key": request(b"GET /v1/models", b"api-key: azure", b"x-api-key: sk-ant", b"anthropic-version: 2023-06-01"),
    "chunks": request(b"POST /v1/audio/transcriptions", b"Content-Type: audio/wav", b"Transfer-Encoding: chunked")
    + b"3\r\nabc\r\n1;ext=1\r\n\xff\r\n0\r\nX-Trailer: t\r\n\r\n",
}  # fmt: skip


CHAT = request(
    b"POST /v1/chat/completions", b"Content-Type: application/json",
    body=b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "x"}]}',
)
SEARCH = request(
    b"POST /v1/chat/completions", b"Content-Type: application/json",
    body=b'{"model": "m", "use_beam_search": true, "messages": [{"role": "user", "content": "x"}]}',
)


@pytest.mark.parametrize("prefix", ENDS)
@pytest.mark.parametrize("name", REQUESTS)
async def test_the_engine_hears_the_request_as_it_was_written(name: str, prefix: str) -> None:
    async with wire() as made:
        answers = await made.both(REQUESTS[name], prefix)
        assert answers[0] == answers[1]
        direct, proxied = made.heard
    assert proxied == direct


def answer(line: bytes, *headers: bytes, body: bytes | None = b"ok") -> bytes:
    length = [] if body is None else [b"Content-Length: %d" % len(body)]
    return b"\r\n".join([b"HTTP/1.1 " + line, *headers, *length, b"", body or b""])


ANSWERS = {
    "plain": answer(b"200 OK", b"Content-Type: application/json", b"x-request-id: r", b"openai-version: 2020-10-01"),
    "bare": answer(b"200 OK"),
    "own words": answer(b"299 Quite Fine", b"Server: s", b"Date: Mon, 01 Jan 2024 00:00:00 GMT"),
    "no words": answer(b"200 "),
    "twice": answer(b"200 OK", b"Set-Cookie: a=1; Path=/", b"Set-Cookie: b=2", b"x-ratelimit-Remaining: 1"),
    "compressed": answer(b"200 OK", b"Content-Encoding: gzip", b"Content-Type: a/b", body=gzip.compress(b"x" * 5000)),
    "odd compression": answer(b"200 OK", b"Content-Encoding: zstd", body=b"\x28\xb5\x2f\xfd"),
    "binary": answer(b"200 OK", b"Content-Type: audio/mpeg", body=bytes(range(256)) * 1000),
    "nothing": answer(b"200 OK", body=b""),
    "no content": answer(b"204 No Content", b"X-Own: 1", body=None),
    "not modified": answer(b"304 Not Modified", b'ETag: "e"', body=None),
    "part": answer(b"206 Partial Content", b"Content-Range: bytes 0-1/9"),
    "elsewhere": answer(b"302 Found", b"Location: https://elsewhere.example/v1/x?sig=%2F", body=b""),
    "nowhere": answer(b"303 See Other", b"Location: http://[", body=b""),
    "gone": answer(b"410 Gone", b"Content-Type: text/plain"),
    "wait": answer(b"429 Too Many Requests", b"Retry-After: 7", b"retry-after-ms: 7000"),
    "broken": answer(b"503 Service Unavailable", b"x-should-retry: false"),
    "long": answer(b"200 OK", b"X-Long: " + b"x" * 30_000),
    "many": answer(b"200 OK", *(b"X-%d: %d" % (number, number) for number in range(900))),
    "chunks": answer(b"200 OK", b"Transfer-Encoding: chunked", body=None) + b"2\r\nab\r\n1\r\nc\r\n0\r\nX-T: 1\r\n\r\n",
}


@pytest.mark.parametrize("prefix", ENDS)
@pytest.mark.parametrize("name", ANSWERS)
async def test_the_client_hears_the_answer_as_it_was_written(name: str, prefix: str) -> None:
    bodyless = ANSWERS[name].startswith((b"HTTP/1.1 204", b"HTTP/1.1 304"))
    async with wire(ANSWERS[name]) as made:
        direct, proxied = await made.both(REQUESTS["form"], prefix, bodyless=bodyless)
    assert (proxied.line, proxied.body) == (direct.line, direct.body)
    assert proxied.headers == direct.headers


async def test_a_captured_answer_keeps_its_headers_in_their_order_and_spelling() -> None:
    """The length among them, which is another without the ids that only we asked for."""
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop", "token_ids": [1234]}
    said = json.dumps({"id": "c", "model": "m", "choices": [choice], "prompt_token_ids": [1]}).encode()
    head = [b"date: then", b"content-length: %d" % len(said), b"Content-type: application/json"]
    asked = request(
        b"POST /v1/chat/completions", b"Content-Type: application/json",
        body=b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}',
    )
    engine = wire(b"\r\n".join([b"HTTP/1.1 200 OK", *head, b"", said]))
    async with engine as made, connected(made.front, asked) as (reader, _):
        _, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        seen = [line for line in lines if not line.startswith(b"X-AJet-")]
        assert [line.partition(b":")[0] for line in seen] == [b"date", b"content-length", b"Content-type"]
        length = int(seen[1].partition(b":")[2])
        body = await reader.readexactly(length)
    assert json.loads(body)["choices"][0] == choice | {"token_ids": None}
    assert length != len(said)


PERMITTED = answer(
    b"200 OK", b"access-control-allow-origin: *", b"access-control-allow-headers: authorization", b"vary: Origin",
    body=b"OK",
)


@pytest.mark.parametrize("secret", [None, "s" * 32])
@pytest.mark.parametrize("prefix", ENDS)
async def test_a_browser_asks_without_a_key_what_a_page_may_ask(prefix: str, secret: str | None) -> None:
    """As it does at vLLM with ``--api-key``: no page could reach an engine otherwise. The body of such a request, which
    no browser sends, stays with us."""
    asked = request(
        b"OPTIONS /v1/chat/completions?x=%20", b"Origin: https://app.example", b"Access-Control-Request-Method: POST",
        b"Access-Control-Request-Headers: authorization,x-stainless-lang", body=b"",
    )
    async with wire(PERMITTED, secret) as made:
        direct, proxied = await made.both(asked, prefix)
        assert proxied == direct
        assert made.heard[1] == made.heard[0]
        with_body = asked.replace(b"Content-Length: 0", b"Content-Length: 3") + b"abc"
        assert await made.ask(made.front, with_body) == direct
        assert made.heard[2] == made.heard[0]
        assert made.events == []


@pytest.mark.parametrize(("part", "other"), [
    (b"OPTIONS", b"POST"), (b"Origin", b"X-Origin"), (b"Access-Control-Request-Method", b"X-Method"),
])  # fmt: skip
async def test_whatever_else_comes_without_a_key_is_refused(part: bytes, other: bytes) -> None:
    asked = request(b"OPTIONS /v1/models", b"Origin: https://app.example", b"Access-Control-Request-Method: GET")
    async with wire(PERMITTED, "s" * 32) as made:
        refused = await made.ask(made.front, asked.replace(part, other))
        assert refused.line == b"HTTP/1.1 401 Unauthorized"
        assert made.heard == []


async def test_the_answer_to_head_says_how_long_a_body_would_be() -> None:
    said = answer(b"200 OK", b"Content-Type: a/b", b"Content-Length: 12345", body=None)
    async with wire(said) as made:
        direct, proxied = await made.both(request(b"HEAD /v1/models"), "", bodyless=True)
    assert proxied == direct


@pytest.mark.parametrize(("location", "seen"), [
    (b"ENGINE/v1/models", b"PREFIX/v1/models"), (b"ENGINE/v1/x%2Fy?a=%20&b", b"PREFIX/v1/x%2Fy?a=%20&b"),
    (b"/v1/models", b"PREFIX/v1/models"), (b"models", b"models"), (b"?page=2", b"?page=2"),
    (b"https://elsewhere.example/v1/models", b"https://elsewhere.example/v1/models"),
    (b"//elsewhere.example/v1", b"//elsewhere.example/v1"),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ENDS)
@pytest.mark.parametrize(
    "asked", [REQUESTS["slash at the end"], CHAT, SEARCH], ids=["passed", "captured", "not to be captured"]
)
async def test_a_redirection_to_the_engine_leads_through_the_front(
    prefix: str, location: bytes, seen: bytes, asked: bytes
) -> None:
    """As FastAPI redirects ``/v1/models/``: its client must not end up at the engine, past the episode."""
    async with wire(answer(b"307 Temporary Redirect", b"Location: " + location, body=b"")) as made:
        _, proxied = await made.both(asked, prefix)
    shown = [line for line in proxied.headers if not line.startswith(b"X-AJet-")]
    assert shown == [b"Location: " + seen.replace(b"PREFIX", prefix.encode())]


async def test_values_of_one_name_in_two_spellings_all_arrive() -> None:
    """In the first one's: names are alike however they are written (RFC 9110, section 5.1)."""
    asked = request(b"GET /v1/models", b"X-Tag: a", b"Cookie: a=1", b"x-tag: b", b"cookie: b=2", b"X-TAG: c")
    async with wire() as made:
        await made.both(asked, "")
    assert made.heard[1].headers == [b"X-Tag: a", b"Cookie: a=1", b"X-Tag: b", b"Cookie: b=2", b"X-Tag: c"]


async def test_the_engine_hears_by_which_way_a_request_came() -> None:
    asked = request(b"GET /v1/models", b"via: 1.0 front", b"Via: 1.1 ajet_proxy-0123456789abcdef")
    async with wire() as made:
        await made.both(asked, "")
    assert made.heard[1].headers == [b"via: 1.0 front", b"via: 1.1 ajet_proxy-0123456789abcdef", VIA.lower()]


async def test_what_is_not_utf8_in_a_header_arrives_as_that() -> None:
    """aiohttp writes nothing else, and would leave it out."""
    asked = request(b"GET /v1/models", b"X-Title: caf\xe9", b"X-Name: \xc3\xa9")
    async with wire(answer(b"200 D\xe9j\xe0 vu", b"X-Own: \xe9t\xe9")) as made:
        _, proxied = await made.both(asked, "")
    assert made.heard[1].headers == ["X-Title: café".encode(), "X-Name: é".encode()]
    assert (proxied.line, proxied.headers) == ("HTTP/1.1 200 Déjà vu".encode(), ["X-Own: été".encode()])


@pytest.mark.parametrize("head", [b"200 OK\r\nX: " + b"x" * 70_000, b"200 OK" + b"\r\nX: x" * 1001, b"2000 OK"])
async def test_a_head_that_cannot_be_read_is_said_to_be_that(head: bytes) -> None:
    async with wire(b"HTTP/1.1 " + head + b"\r\nContent-Length: 2\r\n\r\nok") as made:
        proxied = await made.ask(made.front, CHAT)
    assert proxied.line == b"HTTP/1.1 502 Bad Gateway"
    assert b"that is not HTTP, or whose head is too long" in proxied.body
    assert [event.reason for event in made.events if isinstance(event, CallLost)] == ["engine_error"]


@pytest.mark.parametrize("asked", [request(b"GET /v1/models"), CHAT], ids=["passed", "captured"])
async def test_a_body_without_a_length_ends_with_the_connection_of_an_old_client(asked: bytes) -> None:
    """HTTP/1.0 knows no chunks (RFC 9112, section 6.3), whatever it asks of the connection."""
    event = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    said = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    said += b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
    old = asked.replace(b"HTTP/1.1", b"HTTP/1.0\r\nConnection: keep-alive")
    async with wire(said) as made, connected(made.front, old) as (reader, _):
        async with asyncio.timeout(300):
            assert (await reader.read()).endswith(b"\r\n\r\n" + event)
