"""An engine's answer on its way to the client: captured, or passed through as it is.

Invariant: bytes leave in the order in which they came, and those that complete a captured answer leave only after the
`Recorder` has made its calls durable. Calls whose client went away before those were written to it are lost. A client
that goes away ends the engine's request at once. What follows the end of an answer leaves as it comes; calls that it
contradicts are taken back. An answer that breaks off breaks off for the client too, and so does one that the disk does
not take in time: nothing is made up to end it well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final, Protocol

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from ajet_proxy.core.identity.ladder import split_path
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.trajectory.call import DISCONNECTED, ENGINE_ERROR, EPISODE_DISCARDED, STALLED
from ajet_proxy.io.capture.recorder import Recorder
from ajet_proxy.io.capture.streaming import KeepAlive, Shortcut
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream, as_written, leading_back, response_headers, sendable
from ajet_proxy.io.http.aiohttp_internals import stalled, unread
from ajet_proxy.io.http.body import Unmeasured
from ajet_proxy.io.ledger_port.cancellation import called_off
from ajet_sdk.errors import EngineError, EngineTimeout
from ajet_sdk.routes import HEADER_CALL, HEADER_EPISODE

_NO_ROUTE: Final = (404, 405, 501)
"""How an engine says that it does not have a route."""
REFUSED: Final = (400, 403, 422)
"""How an engine says that it does not take a field, or not from everybody."""
MAX_NAMED: Final = 100
"""An answer names so many of its calls at most: clients refuse headers of more than about 8 kB."""
_BROKEN: Final = (aiohttp.ClientError, TimeoutError)


class Sender(Protocol):
    """Who sends a request: `Upstream`, or one that asks it in another way."""

    async def send(self, request: EngineRequest) -> aiohttp.ClientResponse:
        """The engine's answer as soon as its headers are there."""


class Streamed(Unmeasured):
    """An engine's answer that leaves as it comes, with its headers; `keep_length` if its body stays as it is."""

    def __init__(self, answer: aiohttp.ClientResponse, *, keep_length: bool) -> None:
        headers = response_headers(as_written(answer.raw_headers), keep_length=keep_length)
        super().__init__(status=answer.status, reason=sendable(answer.reason or ""), headers=headers)
        self.lacking = _lacking(headers)


class Document(web.Response):
    """An engine's answer in one piece, with the engine's headers, `body` in place of its body, and perhaps `status`.
    Its ``sent`` is called when all of it has left, ``unsent`` if the client goes away before that."""

    def __init__(self, answer: aiohttp.ClientResponse, body: bytes, status: int | None) -> None:
        headers = response_headers(as_written(answer.raw_headers), keep_length=True)
        for name in [name for name in headers if name.lower() == "content-length"]:
            headers[name] = str(len(body))  # where it stands and as it is spelled
        reason = sendable(answer.reason or "") if status is None else None
        super().__init__(status=status or answer.status, reason=reason, headers=headers, body=body)
        self.lacking = _lacking(headers)
        self.unsent: Callable[[], None] = lambda: None
        self.sent: Callable[[], None] = lambda: None

    async def write_eof(self, data: bytes = b"") -> None:
        try:
            await super().write_eof(data)
        except (asyncio.CancelledError, ConnectionError):
            self.unsent()
            raise
        self.sent()


def _lacking(headers: Mapping[str, str]) -> list[str]:
    return [name for name in ("Date", "Server", "Content-Type") if name not in headers]


async def leave_out(_http: web.Request, response: web.StreamResponse) -> None:
    """A signal of the application: take out again what aiohttp adds to every answer and this engine did not send."""
    if isinstance(response, Streamed | Document):
        for name in response.lacking:
            response.headers.pop(name, None)


async def captured(
    http: web.Request, request: EngineRequest, exchange: Exchange, recorder: Recorder, upstream: Sender,
    *, keep_alive_s: float, own: EngineRequest | None = None, heard: Callable[[bytes], None] | None = None,
) -> web.StreamResponse:
    """Send `request`, give the client what `exchange` makes of the answer, and record its calls. A stream whose engine
    is silent for `keep_alive_s` (0: however long) is kept alive in the client's protocol. `own` is what an engine is
    asked that has no route for `request`. `heard` gets an answer that is not captured."""
    try:
        answer, asked = await _ask(request, exchange, upstream, own)
        recorder.engine = str(answer.url).partition("?")[0]
        try:
            exchange.on_headers(answer.status, answer.headers.get("Content-Type", ""))
            if exchange.settled:
                await recorder.end(exchange.outcomes)
            told = heard if exchange.skip is not None else None
            if exchange.buffered:
                document = await _document(answer, exchange, recorder, told)
                document.unsent, document.sent = lambda: recorder.lose(_gone(http)), recorder.sent
                _lead_back(http, answer, asked, document)
                return document
            response = Streamed(answer, keep_length=exchange.settled)
            _lead_back(http, answer, asked, response)
            return await _stream(http, answer, response, exchange, recorder, keep_alive_s, told)
        finally:
            answer.close()
    except (asyncio.CancelledError, ConnectionError):
        recorder.lose(_gone(http))
        raise
    except BaseException:
        recorder.lose(ENGINE_ERROR)
        raise


def _gone(http: web.Request) -> str:
    """Why the client of `http` gets no end of its answer."""
    return EPISODE_DISCARDED if called_off(http) else STALLED if stalled(http) else DISCONNECTED


async def _ask(
    request: EngineRequest, exchange: Exchange, upstream: Sender, instead: EngineRequest | None
) -> tuple[aiohttp.ClientResponse, EngineRequest]:
    """The engine's answer to `request`, or to what it is asked if it does not take that; and what it was asked."""
    answer = await upstream.send(request)
    if answer.status in REFUSED and exchange.retreat():
        answer.close()
        return await upstream.send(replace(request, body=exchange.upstream_body)), request
    if answer.status in _NO_ROUTE and instead is not None:
        with ExitStack() as refused:
            refused.callback(answer.close)
            own = await upstream.send(instead)
            if own.status not in _NO_ROUTE:
                exchange.pass_by()
                return own, instead
            own.close()
            refused.pop_all()
    return answer, request


async def passed(
    http: web.Request, request: EngineRequest, upstream: Sender, heard: Callable[[bytes], None] = lambda data: None
) -> web.StreamResponse:
    """Send `request` and pass the answer on as it is; `heard` gets it too."""
    answer = await upstream.send(request)
    try:
        response = Streamed(answer, keep_length=True)
        _lead_back(http, answer, request, response)
        await response.prepare(http)
        while True:
            try:
                data = await answer.content.readany()
            except _BROKEN:
                await _write(response, [unread(answer)])
                return _cut(http, response)
            if not data:
                break
            heard(data)
            await response.write(data)
        await response.write_eof()
        return response
    finally:
        answer.close()


async def retold(
    request: EngineRequest, upstream: Upstream, show: Callable[[bytes], bytes]
) -> web.StreamResponse:
    """Send `request` and give the client what `show` makes of an answer in one piece."""
    answer = await upstream.send(request)
    try:
        body = await answer.read()
    except _BROKEN as error:
        raise EngineError("the engine's answer broke off", code="engine_broken") from error
    finally:
        answer.close()
    return Document(answer, show(body) if answer.status == 200 else body, None)


async def _document(
    answer: aiohttp.ClientResponse, exchange: Exchange, recorder: Recorder, heard: Callable[[bytes], None] | None
) -> Document:
    """An answer in one piece, kept back as a whole."""
    try:
        data = await answer.read()
        if heard is not None:
            heard(data)
        exchange.feed(data)
    except _BROKEN as error:
        exchange.abort()
        await recorder.end(exchange.outcomes)
        if isinstance(error, TimeoutError):
            raise EngineTimeout("the engine stopped in the middle of its answer", code="engine_timeout") from error
        raise EngineError("the engine's answer broke off", code="engine_broken") from error
    body = b"".join(exchange.finish())
    recorder.note_version(exchange)
    await recorder.end(exchange.outcomes)
    response = Document(answer, body, exchange.status)
    if answer.status < 400:
        _name(response, recorder)
    return response


async def _stream(
    http: web.Request, answer: aiohttp.ClientResponse, response: Streamed, exchange: Exchange, recorder: Recorder,
    keep_alive_s: float, heard: Callable[[bytes], None] | None,
) -> web.StreamResponse:
    """An answer that leaves as it comes, except for its end."""
    if answer.status < 400:
        _name(response, recorder)
    await response.prepare(http)
    silence = KeepAlive(response, exchange, keep_alive_s)

    def take(data: bytes) -> list[bytes]:
        silence.looks = 0
        if heard is not None:
            heard(data)
        recorder.note_version(exchange)
        return exchange.feed(data)

    with silence, Shortcut(http, answer, response, take=take, enough=lambda: exchange.settled) as flow:
        while True:
            try:
                data = await answer.content.readany()
            except _BROKEN:
                rest = [*exchange.feed(unread(answer)), *exchange.abort()]
                await _record(exchange, recorder)
                await _write_end(response, rest, recorder)
                return _cut(http, response)
            if not data:
                break
            await _write(response, take(data))
            if not exchange.settled:
                await flow.run()
            if exchange.settled and not recorder.ended:
                await recorder.end(exchange.outcomes)
                await _write_end(response, exchange.release(), recorder)
            elif exchange.contradicted is not None:
                recorder.take_back(exchange.contradicted)
        rest = exchange.finish()
        await _record(exchange, recorder)
    await _write_end(response, rest, recorder)
    await response.write_eof()
    return response


async def _record(exchange: Exchange, recorder: Recorder) -> None:
    """Nothing more comes: record the calls, or take back those that are recorded and were contradicted since."""
    await recorder.end(exchange.outcomes)
    if exchange.contradicted is not None:
        recorder.take_back(exchange.contradicted)


def _lead_back(
    http: web.Request, answer: aiohttp.ClientResponse, asked: EngineRequest, response: web.StreamResponse
) -> None:
    """A client that the engine sends on, having been `asked`, stays with us."""
    if (location := response.headers.get("Location")) is not None:
        path = http.rel_url.raw_path
        response.headers["Location"] = leading_back(
            location, engine=str(answer.url).removesuffix(asked.target),
            prefix=path.removesuffix(split_path(path)[1]),
        )


def _name(response: web.StreamResponse, recorder: Recorder) -> None:
    response.headers[HEADER_EPISODE] = recorder.origin.episode
    response.headers[HEADER_CALL] = ",".join(recorder.origin.calls[:MAX_NAMED])


async def _write(response: web.StreamResponse, parts: list[bytes]) -> None:
    if data := b"".join(parts):
        await response.write(data)


async def _write_end(response: web.StreamResponse, parts: list[bytes], recorder: Recorder) -> None:
    """Write what the client gets of a whole answer, or what follows that."""
    await _write(response, parts)
    recorder.sent()


def _cut(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Close the connection after what was written, without the bytes that would end the body well."""
    if http.transport is not None:
        http.transport.close()
    return response
