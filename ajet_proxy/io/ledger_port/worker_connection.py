"""The connection of a worker process and the daemon: questions, answers and notices as MessagePack on a stream socket.

Either side asks (`ask`, which waits for the answer), or notifies (`notify`, which does not). What one side sends
arrives in the order in which it was sent. A question is begun at once, up to where it first waits, so it sees all that
was sent before it. Values are what MessagePack holds, and the structs that both sides know (`Values`); nothing is ever
unpickled. Errors of `ajet_sdk.errors` arrive as what they are.

What is sent within one turn of the event loop leaves as one write.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
from msgspec import Struct
from msgspec.structs import astuple

from ajet_sdk.errors import AjetError, from_body

logger = logging.getLogger(__name__)

GONE = "the other process is gone"
LARGE = 1 << 20
_NOTIFY, _ASK, _ANSWER, _ERROR, _CANCEL = range(5)


class Peer(Protocol):
    """Gives the other side's messages their meaning here."""

    def ask(self, what: str, values: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        """The answer to a question."""

    def notified(self, what: str, values: Sequence[Any]) -> None:
        """Take notice."""

    def lost(self) -> None:
        """The other side is gone."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which one type of value crosses: as what `pack` makes of it."""

    kind: type[Any]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def fields(kind: type[Struct]) -> Form:
    """A struct crosses as its fields."""
    return Form(kind, astuple, lambda packed: kind(*packed))


class Values:
    """The way in which values of `forms` cross. Both sides must have the forms in the same order. Such a value crosses
    as a map with nil for its only name, which no other map has."""

    def __init__(self, forms: Sequence[Form] = ()) -> None:
        self._forms = tuple(forms)
        self._codes = {form.kind: code for code, form in enumerate(self._forms)}

    def packer(self) -> msgpack.Packer:
        """Packs one value after another."""
        return msgpack.Packer(default=self._formed, unicode_errors="surrogatepass")

    def unpacker(self) -> msgpack.Unpacker:
        """Takes bytes as they come, and gives whole values. Sequences are tuples."""
        return msgpack.Unpacker(
            max_buffer_size=0, use_list=False, object_hook=self._made, unicode_errors="surrogatepass",
            strict_map_key=False,
        )  # fmt: skip

    def _formed(self, value: Any) -> dict[None, tuple[int, Any]]:
        code = self._codes.get(type(value))
        if code is None:
            raise TypeError(f"{type(value).__name__} does not cross between processes")
        return {None: (code, self._forms[code].pack(value))}

    def _made(self, found: dict[Any, Any]) -> Any:
        if None not in found:
            return found
        code, packed = found[None]
        return self._forms[code].unpack(packed)


class WorkerConnection(asyncio.Protocol):
    """One end. Make it with the loop's ``create_connection``."""

    def __init__(self, values: Values, peer: Callable[[WorkerConnection], Peer]) -> None:
        """`peer` makes what answers the other side, and may itself ask and notify."""
        self._loop = asyncio.get_running_loop()
        self._values = values
        self._packer = values.packer()
        self._unpacker = values.unpacker()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[Any]] = {}
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.peer = peer(self)

    async def ask(self, what: str, *values: Any) -> Any:
        """The other side's answer, or the error that it raised. A question whose asker goes away is withdrawn."""
        if self._transport is None:
            raise ConnectionResetError(GONE)
        number, answer = next(self._numbers), self._loop.create_future()
        self._asked[number] = answer
        self._send((_ASK, number, what, values))
        try:
            return await answer
        except asyncio.CancelledError:
            self._send((_CANCEL, number, "", ()))
            raise
        finally:
            self._asked.pop(number, None)

    def notify(self, what: str, *values: Any) -> None:
        """Send a notice; it is lost if the other side is gone."""
        self._send((_NOTIFY, 0, what, values))

    def close(self) -> None:
        """Close the connection, once everything queued is sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for task in self._answering.values():
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError(GONE))
        self.peer.lost()

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for kind, number, what, values in self._unpacker:
            if kind == _NOTIFY:
                self.peer.notified(what, values)
            elif kind == _ASK:
                self._answer(number, self.peer.ask(what, values))
            elif kind == _CANCEL:
                if (task := self._answering.get(number)) is not None:
                    task.cancel()
            elif (asked := self._asked.get(number)) is not None and not asked.done():
                if kind == _ANSWER:
                    asked.set_result(values)
                else:
                    status, body, retry_after = values
                    asked.set_exception(from_body(status, body, retry_after=retry_after))

    def _answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.Task(work, loop=self._loop, eager_start=True)
        if task.done():
            self._answered(number, task)
        else:
            self._answering[number] = task
            task.add_done_callback(lambda done: self._answered(number, done))

    def _answered(self, number: int, task: asyncio.Task[Any]) -> None:
        self._answering.pop(number, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send((_ANSWER, number, "", task.result()))
            return
        if not isinstance(error, AjetError):
            logger.error("a question of another process failed", exc_info=error)
            error = AjetError("the proxy failed unexpectedly; its log says why", code="internal_error")
        self._send((_ERROR, number, "", (error.status, error.to_body(), error.retry_after)))

    def _send(self, message: tuple[int, int, str, Any]) -> None:
        if self._transport is None:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        packed = self._packer.pack(message)
        if len(packed) > LARGE:  # a packer never gives back what its largest message took
            self._packer = self._values.packer()
        self._out.append(packed)

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        if data and self._transport is not None:
            self._transport.write(data)
