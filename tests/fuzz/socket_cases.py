"""Cases over real sockets: an engine that replays mutated bytes, asked directly and through the proxy.

The rule: status and body are the same; the body through the proxy is what `reference` makes of the bytes that the
engine sends when the proxy asks. So are the headers, but for ``X-AJet-*``, ``Date`` and how the body is framed. A body
that breaks off breaks off for the client too; where nothing of it has left yet (a document, or an answer that is not
HTTP), the status is 502 and the body an error of contract §5.8. A request that is not HTTP is answered 400 in that
shape. Whatever happens, the proxy goes on to serve.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from tests.fuzz import asking, core_cases, engine
from tests.fuzz.core_cases import PATHS, Case, Differs, same
from tests.fuzz.engine import Answer
from tests.fuzz.mutations import mutated, pieces
from tests.fuzz.reference import Loose
from tests.proxy.io.front import Front

NOT_HTTP = (b"\x16\x03\x01", b"GARBAGE\r\n", b"\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n")
HEADERS = (
    b"transfer-encoding: chunked\r\n", b"content-length: 3\r\n", b"content-length: x\r\n", b": x\r\n", b"no colon\r\n",
    b"x-ajet-reward: nan\r\n", b"x-ajet-final: 1\r\n", b"content-encoding: gzip\r\n", b"host: \xff\r\n",
    b"authorization: Bearer \xff\r\n", b"connection: upgrade\r\nupgrade: websocket\r\n", b"expect: 100-continue\r\n",
)  # fmt: skip
HIDDEN = ("date", "content-length", "transfer-encoding", "connection", "x-ajet-episode", "x-ajet-call")


WITHHOLDING = Answer(200, "application/json", (b'{"choices":[{"token_ids":null}]}',))


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer as the client has it; `whole` if it ended as its framing says, `status` 0 if there was none."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class Script:
    """The script of the engine: `head`, then the framed body in `parts`; `broken` if it then breaks off."""

    head: bytes
    parts: list[bytes]
    broken: bool


@dataclass(slots=True)
class Wire:
    """``async with Wire() as wire``: the engine and the proxy before it."""

    script: Script | None = None
    front: Front = field(init=False)
    _server: asyncio.Server = field(init=False)
    _url: str = ""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        host, port = self._server.sockets[0].getsockname()[:2]
        self._url = f"http://{host}:{port}"
        self.front = Front(self._url)
        await self.front.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.front.__aexit__(kind, error, trace)
        self._server.close()

    async def play(self, case: Case) -> None:
        dice = case.dice
        kind = dice.choices((self._answered, self._asked, self._garbled), (60, 25, 15))[0]
        case.counts[f"sockets: {kind.__name__.removeprefix('_')}"] += 1
        await kind(case, dice)
        if dice.random() < 0.02:
            self.script = None
            same((await exchange_bytes(self.front.url, _http("GET", "/health", b""))).status, 200, "afterwards")

    async def _answered(self, case: Case, dice: random.Random) -> None:
        """A good request, and an answer that is not."""
        name, path, body, answer = dice.choice(core_cases.pool())
        parts, names = mutated(list(answer.parts), dice)
        changed = Answer(answer.status, answer.content_type, tuple(parts))
        broken = dice.random() < 0.2
        case.notes += [name, path, *names, "broken off" if broken else "ended", repr(changed.body[:6000])]
        self.script = script = _script(changed, dice, broken)
        direct = await exchange_bytes(self._url, _http("POST", path, body))
        seen = await exchange_bytes(self.front.url, _http("POST", f"/e/{_episode(case)}{path}", body))
        exchange = Exchange(CAPTURED[path], JsonBody(body))
        exchange.on_headers(changed.status, changed.content_type)
        if not direct.whole and (exchange.buffered or direct.status == 0):
            return _is_error(seen, 502, "a document that broke off")
        same(seen.status, direct.status, "status")
        same(seen.whole, direct.whole, "whether the body ended")
        same(_headers(seen), _headers(direct), "headers")
        reference = core_cases.reference_of(path, body)
        try:
            expected = b"".join(core_cases.expected_of(
                reference, exchange, Answer(changed.status, changed.content_type, (direct.body,)), script.broken
            ))
        except Loose:
            case.counts["loose"] += 1
            return None
        same(seen.body, expected, "body")
        return None

    async def _asked(self, case: Case, dice: random.Random) -> None:
        """A mutated request to an engine that answers what it is asked, or refuses it."""
        path = dice.choice(PATHS)
        body, names = asking.odd(path, dice)
        case.notes += [path, *names, repr(body[:2000])]
        self.script = None
        direct = await exchange_bytes(self._url, _http("POST", path, body))
        seen = await exchange_bytes(self.front.url, _http("POST", f"/e/{_episode(case)}{path}", body))
        if seen.status == 413:  # a hundred thousand lists, which no engine here can read either
            case.counts["too much"] += 1
            return same((b'"too_many_messages"' in seen.body, direct.status), (True, 400), "what refuses it")
        same(seen.status, direct.status, "status")
        if b'"too_many_choices"' in seen.body:
            case.counts["too many choices"] += 1
            return None  # which is more than any engine takes here
        same(_headers(seen), _headers(direct), "headers")
        return same(sorted(seen.body.split(b"\n\n")), sorted(direct.body.split(b"\n\n")), "body")  # choices take turns

    async def _garbled(self, case: Case, dice: random.Random) -> None:
        """Bytes that are HTTP no longer."""
        path = dice.choice(PATHS)
        body = json.dumps(asking.request(path, dice)).encode()
        raw = bytearray(_http("POST", f"/e/{_episode(case)}{path}", body))
        head = raw.index(b"\r\n\r\n")
        for _ in range(dice.choice((1, 1, 3))):
            match dice.randrange(5):
                case 0:
                    raw[dice.randrange(min(head, len(raw)))] = dice.randrange(256)
                case 1:
                    place = raw.find(b"\r\n") + 2
                    raw[place:place] = b"x-long: " + b"a" * dice.choice((100, 9000, 70_000)) + b"\r\n"
                case 2:
                    raw[:0] = dice.choice(NOT_HTTP)
                case 3:
                    del raw[dice.randrange(1, len(raw)) :]
                case _:
                    place = raw.find(b"\r\n") + 2
                    raw[place:place] = dice.choice(HEADERS)
        case.notes.append(repr(bytes(raw[:3000])))
        self.script = None
        seen = await exchange_bytes(self.front.url, bytes(raw), hang_up=True)
        case.counts[f"sockets: garbled, answered {seen.status}"] += 1
        if seen.status >= 500:
            raise Differs(f"status {seen.status}: {seen.body[:500]!r}")
        if seen.status >= 400 and seen.status != 417:  # an Expect that nobody sends, which aiohttp itself declines
            _is_error(seen, seen.status, "a request that is no HTTP")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The engine: answers one request on each connection by the script, or by what is asked."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            length = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            script = self.script or _plain(head.split(b" ")[1].decode(), body)
            if self.script and _is_trial(body):
                script = _script(WITHHOLDING, random.Random(0), broken=False)
            for part in (script.head, *script.parts):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _is_trial(body: bytes) -> bool:
    """Tell whether the proxy asks if the engine withholds ids, which that of the recorded answers does."""
    with suppress(ValueError, TypeError, AttributeError):
        asked = json.loads(body)
        doubt = CAPTURED["/v1/chat/completions"].doubt(asked)
        return doubt is not None and any(asked == question for _, question in doubt.questions(asked.get("model")))
    return False


def _plain(path: str, body: bytes) -> Script:
    answer = engine.ask(path, body) if path in engine.KINDS else Answer(200, "application/json", (b"{}",))
    return _script(answer, random.Random(0), broken=False)


def _script(answer: Answer, dice: random.Random, broken: bool) -> Script:
    """`answer` framed by its length, in chunks or by the connection's end; a broken one stops short of that."""
    body = answer.body
    head = f"HTTP/1.1 {answer.status} Fine\r\ncontent-type: {answer.content_type}\r\nconnection: close\r\n".encode()
    stream = answer.content_type.lower().startswith("text/event-stream")
    framing = dice.choice(("chunks", "chunks", "end" if not broken else "chunks") if stream else ("length", "chunks"))
    parts = pieces(body, dice) if len(body) < 20_000 else [body]
    if len(parts) > 300:
        parts = [body]
    if framing == "chunks":
        framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part]
        return Script(head + b"transfer-encoding: chunked\r\n\r\n", framed + ([] if broken else [b"0\r\n\r\n"]), broken)
    if framing == "end":
        return Script(head + b"\r\n", parts, broken)
    return Script(head + b"content-length: %d\r\n\r\n" % (len(body) + 10 * broken), parts, broken)


def _http(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _episode(case: Case) -> str:
    return "fuzz-" + case.seed.replace("/", "-")


def _headers(seen: Seen) -> dict[str, str]:
    return {name: value for name, value in seen.headers.items() if name not in HIDDEN}


def _is_error(seen: Seen, status: int, what: str) -> None:
    same(seen.status, status, what)
    error = json.loads(seen.body)["error"]
    if not {"message", "type", "code", "param"} <= set(error):
        raise Differs(f"{what}: not the shape of an error: {error}")


async def exchange_bytes(url: str, raw: bytes, *, hang_up: bool = False) -> Seen:
    """The answer of a server to `raw`; with `hang_up`, after which no more comes."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    try:
        writer.write(raw)
        if hang_up and writer.can_write_eof():
            writer.write_eof()
        answer = bytearray()
        try:
            while data := await reader.read(1 << 16):
                answer += data
        except ConnectionError:
            pass
        return _parsed(bytes(answer))
    finally:
        writer.close()


def _parsed(raw: bytes) -> Seen:
    head, blank, body = raw.partition(b"\r\n\r\n")
    if b" 100 " in head.split(b"\r\n")[0]:
        return _parsed(body)
    if not blank:
        return Seen(0, {}, b"", whole=False)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split(" ")[1])
    if headers.get("transfer-encoding") == "chunked":
        return Seen(status, headers, *_unchunked(body))
    if "content-length" in headers:
        return Seen(status, headers, body, whole=len(body) == int(headers["content-length"]))
    return Seen(status, headers, body, whole=True)


def _unchunked(raw: bytes) -> tuple[bytes, bool]:
    body = b""
    while True:
        size, line_end, rest = raw.partition(b"\r\n")
        if not line_end:
            return body, False
        length = int(size, 16)
        if length == 0:
            return body, True
        body += rest[:length]
        if len(rest) < length + 2:
            return body, False
        raw = rest[length + 2 :]
