"""An engine's answer on its way to the client: captured, or passed through as it is.

A captured answer leaves in two parts. `relay` passes on what comes until it is known what became of the calls, and
keeps back what completes the answer. `release` lets that go, and what follows. Between the two, `pipeline` has the
calls recorded.

Invariant: bytes leave in the order in which they came, and those that complete a captured answer leave only after the
`Recorder` has made its calls durable. Calls whose client went away before those were written to it are lost. What
follows the end of an answer leaves as it comes; calls that it contradicts are taken back. If an answer breaks off, or
the disk does not take it in time, it breaks off for the client too: no proper end is made up.

Next: ajet_proxy/core/trajectory/timeline.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Final, Protocol, Self

import aiohttp
from aiohttp import web
from yarl import URL

from ajet_proxy.core.identity.ladder import split_path
from ajet_proxy.core.protocol.usage import Tail
from ajet_proxy.core.trajectory.call import DISCONNECTED, EPISODE_DISCARDED, RESTARTED, STALLED, TRUNCATED
from ajet_proxy.io.capture.recorder import Recorder
from ajet_proxy.io.capture.streaming import KeepAlive, Shortcut
from ajet_proxy.io.engines.pulse import Pulse
from ajet_proxy.io.engines.upstream import EngineRequest, Upstream, as_written, response_headers, sendable
from ajet_proxy.io.http.aiohttp_internals import stalled, stopped, unread
from ajet_proxy.io.http.body import Unmeasured
from ajet_proxy.io.ledger_port.cancellation import called_off
from ajet_sdk.errors import EngineError, EngineTimeout
from ajet_sdk.headers import HEADER_CALL, HEADER_EPISODE

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


class WholeAnswer(web.Response):
    """An engine's answer in one piece: its headers, and `body` in place of its body. ``sent`` is called when all of it
    has left, ``unsent`` if the client goes away before that."""

    def __init__(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        headers = response_headers(as_written(answer.raw_headers), keep_length=True)
        for name in [name for name in headers if name.lower() == "content-length"]:
            headers[name] = str(len(body))  # where it stands and as it is spelled
        super().__init__(status=answer.status, reason=sendable(answer.reason or ""), headers=headers, body=body)
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
    """Called before an answer leaves: take out what aiohttp adds to every answer and this engine did not send."""
    if isinstance(response, Streamed | WholeAnswer):
        for name in response.lacking:
            response.headers.pop(name, None)


class _Relay:
    """One captured answer, as a context that closes it at the end. `relay` passes on what comes until the exchange is
    settled. `release` is for when the calls are recorded: it sends what was kept back, and all that follows."""

    def __init__(
        self, http: web.Request, answer: aiohttp.ClientResponse, request: EngineRequest, recorder: Recorder,
        tail: Tail | None, pulse: Pulse, keep_alive_s: float,
    ) -> None:
        """`answer` is the engine's to `request`, and `pulse` that engine's; the exchange has seen the answer's headers.
        `tail` gets an answer that is not captured. A stream whose client heard nothing for `keep_alive_s` (0: never) is
        kept alive in its protocol."""
        self._http = http
        self._answer = answer
        self._request = request
        self._exchange = recorder.exchange
        self._recorder = recorder
        self._keep_alive_s = keep_alive_s
        self._tail = tail
        self._pulse = pulse
        self._open = ExitStack()
        """All that ends with the answer."""
        self._open.callback(answer.close)
        self._open.enter_context(pulse)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _address(self, response: web.StreamResponse) -> None:
        """Set the headers that are ours."""
        if self._answer.status < 400:
            response.headers[HEADER_EPISODE] = self._recorder.origin.episode
            response.headers[HEADER_CALL] = ",".join(self._recorder.origin.calls[:MAX_NAMED])
        _lead_back(self._http, self._answer, self._request, response)


class WholeRelay(_Relay):
    """An answer in one piece, kept back as a whole."""

    _body: bytes | None = None
    _error: Exception | None = None

    async def relay(self) -> None:
        if not self._exchange.settled:
            await self._read()

    async def release(self) -> web.StreamResponse:
        if self._body is None and self._error is None:
            await self._read()
        if isinstance(self._error, TimeoutError):
            raise EngineTimeout(
                "the engine stopped in the middle of its answer", code="engine_timeout"
            ) from self._error
        if self._body is None:
            raise EngineError("the engine's answer broke off", code="engine_broken") from self._error
        if (lost := self._exchange.failed) is not None:
            self._recorder.lose(lost)
        response = WholeAnswer(self._answer, self._body)
        response.unsent = lambda: self._recorder.lose(why_gone(self._http))
        response.sent = self._recorder.sent
        self._address(response)
        return response

    async def _read(self) -> None:
        try:
            data = await self._answer.read()
        except _BROKEN as error:
            self._error = _bare(error)
            self._exchange.abort()
            return
        self._pulse.beat = True
        if self._tail is not None:
            self._tail.feed(data)
        self._exchange.feed(data)
        self._body = b"".join(self._exchange.finish())
        self._recorder.note_version()


class StreamRelay(_Relay):
    """An answer that leaves as it comes, except for its end."""

    _shortcut: Shortcut | None = None
    _take: Callable[[bytes], list[bytes]]
    """Gives the client's part of a piece of the answer."""
    _rest: list[bytes] | None = None
    """The client's part of the end, once no more comes."""
    _is_cut = False
    _silence: KeepAlive

    async def relay(self) -> None:
        if self._exchange.settled:  # nothing of it is captured
            return
        shortcut = await self._begin()
        while not self._exchange.settled:
            await self._pass_on()
            if not self._exchange.settled:
                await shortcut.run()

    async def release(self) -> web.StreamResponse:
        if self._shortcut is None:
            await self._begin()
        elif self._rest is None:
            await self._write_end(self._exchange.release())
        while self._rest is None:
            await self._pass_on()
            if self._exchange.contradicted is not None:
                self._recorder.take_back(self._exchange.contradicted)
        self._open.close()
        self._note_failure()
        await self._write_end(self._rest)
        if not self._is_cut:
            await self._response.write_eof()
            return self._response
        return _cut(self._http, self._response)

    async def _begin(self) -> Shortcut:
        """Send the headers, and get ready for the body."""
        http, exchange, recorder, tail, pulse = self._http, self._exchange, self._recorder, self._tail, self._pulse
        self._response = response = Streamed(self._answer, keep_length=exchange.settled)
        self._address(response)
        await response.prepare(http)
        every_s = 0.0 if "Content-Length" in response.headers else self._keep_alive_s  # nothing more fits in
        self._silence = silence = self._open.enter_context(KeepAlive(response, exchange, every_s))

        def take(data: bytes) -> list[bytes]:
            pulse.beat, recorder.came_at = True, monotonic()
            if tail is not None:
                tail.feed(data)
            recorder.note_version()
            parts = exchange.feed(data)
            if exchange.heard:
                exchange.heard = False
                silence.heard()
            return parts

        self._take = take
        self._shortcut = self._open.enter_context(
            Shortcut(http, self._answer, response, take=take, enough=lambda: exchange.settled)
        )
        return self._shortcut

    async def _pass_on(self) -> None:
        """Wait for what comes next, and write what the client gets of it at once."""
        try:
            data = await self._answer.content.readany()
        except _BROKEN as error:
            _bare(error)
            self._is_cut = True
            self._rest = [*self._exchange.feed(unread(self._answer)), *self._exchange.abort()]
            return
        if not data:
            self._rest = self._exchange.finish()
            return
        parts = self._take(data)
        if self._tail is not None and self._answer.content.at_eof():  # a failure is known before its client knows
            self._rest = self._exchange.finish()
        self._note_failure()
        await _write(self._response, parts)

    def _note_failure(self) -> None:
        """Lose calls that are not captured if their client has no answer."""
        lost = TRUNCATED if self._is_cut else self._exchange.failed
        if lost is not None:
            self._recorder.lose(lost)

    async def _write_end(self, parts: list[bytes]) -> None:
        """Write what the client gets of a whole answer, or what follows that, and note that it was sent."""
        await _write(self._response, parts)
        self._silence.heard()
        self._recorder.sent()


Relay = WholeRelay | StreamRelay


def relaying(
    http: web.Request, answer: aiohttp.ClientResponse, request: EngineRequest, recorder: Recorder, tail: Tail | None,
    pulse: Pulse, *, keep_alive_s: float,
) -> Relay:
    """The relay of `answer`. The exchange is told the answer's headers first."""
    recorder.answered(answer)
    kind = WholeRelay if recorder.exchange.buffered else StreamRelay
    return kind(http, answer, request, recorder, tail, pulse, keep_alive_s)


def why_gone(http: web.Request) -> str:
    """Why the client of `http` does not get the end of its answer."""
    if called_off(http):
        return EPISODE_DISCARDED
    return STALLED if stalled(http) else RESTARTED if stopped(http) else DISCONNECTED


async def passed(
    http: web.Request, request: EngineRequest, upstream: Sender, heard: Callable[[bytes], None] = lambda data: None
) -> web.StreamResponse:
    """Send `request` and pass the answer on as it is; `heard` gets its bytes too."""
    answer = await upstream.send(request)
    try:
        response = Streamed(answer, keep_length=True)
        _lead_back(http, answer, request, response)
        await response.prepare(http)
        while True:
            try:
                data = await answer.content.readany()
            except _BROKEN as error:
                _bare(error)
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


async def stored(request: EngineRequest, upstream: Upstream, show: Callable[[bytes], bytes]) -> web.StreamResponse:
    """Send `request`, which fetches a response that the engine keeps, and give the client what `show` makes of it."""
    answer = await upstream.send(request)
    try:
        body = await answer.read()
    except _BROKEN as error:
        raise EngineError("the engine's answer broke off", code="engine_broken") from _bare(error)
    finally:
        answer.close()
    return WholeAnswer(answer, show(body) if answer.status == 200 else body)


def _bare(error: Exception) -> Exception:
    """`error` without the frames that it passed through. The engine's answer keeps the error of its end, and these
    frames hold the answer: a cycle that would keep the request in memory."""
    return error.with_traceback(None)


def _lead_back(
    http: web.Request, answer: aiohttp.ClientResponse, asked: EngineRequest, response: web.StreamResponse
) -> None:
    """Change a redirect, with which the engine answered what it was `asked`, so that the client stays with us, under
    what stands before ``/v1`` in its own path."""
    if (location := response.headers.get("Location")) is None:
        return
    engine, path = str(answer.url).removesuffix(asked.target), http.rel_url.raw_path
    prefix = path.removesuffix(split_path(path)[1])
    if location.startswith(f"{engine}/"):
        response.headers["Location"] = prefix + location.removeprefix(engine)
    elif location.startswith("/") and not location.startswith("//"):
        response.headers["Location"] = prefix + location.removeprefix(URL(engine).raw_path.rstrip("/"))


async def _write(response: web.StreamResponse, parts: list[bytes]) -> None:
    if data := b"".join(parts):
        await response.write(data)


def _cut(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Close the connection after what was written, without the bytes that would properly end the body."""
    if http.transport is not None:
        http.transport.close()
    return response
