"""The ledger's side of a worker's `RemotePort`: answers its questions by the `LedgerPort` of this process.

Invariant: what a worker entered, it leaves. When the worker is gone, the calls that it had in flight are lost at once
and the gate does not count them. What it was told to be on disk is on disk. It may have had requests that it never
spoke of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from ajet_proxy.core.continuity.memory import Sought
from ajet_proxy.core.trajectory.call import RESTARTED
from ajet_proxy.io.ledger_port.local import LocalPort
from ajet_proxy.io.ledger_port.port import Begun, Ending, Gone, Whole, unsent
from ajet_proxy.io.ledger_port.remote import NOTICES, QUESTIONS

Notified = Callable[..., None]


class PortServer:
    """Answers one worker, and says by `notify` which of its requests belong to discarded episodes. `more` are further
    notices that the worker may send, by name. `gone` is called when the worker is gone."""

    def __init__(
        self, ledger_port: LocalPort, *, notify: Notified, more: Mapping[str, Notified], gone: Callable[[], None]
    ) -> None:
        self._ledger_port = ledger_port
        self._notify = notify
        self._gone = gone
        self._inside: dict[int, tuple[AbstractAsyncContextManager[Any], Begun | None]] = {}
        self._is_lost = False
        self._answered: set[str] = set()
        """Calls on disk whose clients the worker has not sent the end yet, as far as it has said."""
        own: dict[str, Any] = {
            "find": ledger_port.find, "leave": self._leave,
            "enter": partial(self._go_in, ledger_port.enter), "begin": partial(self._go_in, ledger_port.begin),
            "recall": lambda sought, episode: ledger_port.recall(Sought(*sought), episode),
            "end": self._end, "sent": self._sent, "lose": self._lose, **more,
        }
        self._means = {name: getattr(ledger_port, name) for name in (*QUESTIONS, *NOTICES)} | own

    def ask(self, what: str, values: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        work: Coroutine[Any, Any, Any] = self._means[what](*values)
        return work

    def notified(self, what: str, values: Sequence[Any]) -> None:
        self._means[what](*values)

    def lost(self) -> None:
        self._is_lost = True
        for entry, (_, begun) in list(self._inside.items()):
            if begun is not None:
                self._ledger_port.lose([Gone(begun.episode, call, RESTARTED) for call in begun.calls])
            self._leave(entry)
        self._ledger_port.unread(None)
        self._ledger_port.unknown(tuple(self._answered))
        self._gone()

    async def _go_in(
        self, way: Callable[..., AbstractAsyncContextManager[Begun | None]], entry: int, *asked: Any
    ) -> Begun | None:
        inside = way(*asked, partial(self._notify, "discarded", entry))
        begun = await inside.__aenter__()
        self._inside[entry] = inside, begun
        return begun

    def _leave(self, entry: int) -> None:
        """Leave what was entered. There is nothing to leave if the worker withdrew before it was let in."""
        inside, _ = self._inside.pop(entry, (None, None))
        if inside is not None:
            run(inside.__aexit__(None, None, None))

    async def _end(self, endings: Sequence[Ending]) -> None:
        try:
            await self._ledger_port.end(endings)
        except asyncio.CancelledError:
            if self._is_lost:
                self._ledger_port.lose(unsent(endings, RESTARTED))
            raise  # else the worker says why
        self._answered.update(ending.call.turn.call for ending in endings if isinstance(ending, Whole))

    def _sent(self, calls: Sequence[str]) -> None:
        self._answered.difference_update(calls)
        self._ledger_port.sent(calls)

    def _lose(self, endings: Sequence[Ending]) -> None:
        self._answered.difference_update(ending.call for ending in endings if isinstance(ending, Gone))
        self._ledger_port.lose(endings)


def run(work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` to its end; `RuntimeError` if it would wait."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("left waiting")
