"""Whose clients were sent the end of their answers: put on record, a few times a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import NotReady

SENT_S = 0.25
"""So often it is put on record at most."""


class Receipts:
    """Gathers calls, and records them in `store`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._sent: set[str] = set()
        self._unknown: set[str] = set()
        self._noting: asyncio.TimerHandle | None = None
        self._closed = False

    def sent(self, calls: Sequence[str]) -> None:
        """The clients of `calls` have been sent the end."""
        self._sent.update(calls)
        self._note_later()

    def unknown(self, calls: Sequence[str]) -> None:
        """Nobody will know whether the clients of `calls` were sent it."""
        self._unknown.update(calls)
        self._note_later()

    def close(self) -> None:
        """Record what there is. Later ones are not recorded, since nobody is answered from now on."""
        if self._noting is not None:
            self._noting.cancel()
        self._note()
        self._closed = True

    def _note_later(self) -> None:
        if self._noting is None and not self._closed:
            self._noting = asyncio.get_running_loop().call_later(SENT_S, self._note)

    def _note(self) -> None:
        """Record them; if the disk refuses, try again later."""
        self._noting = None
        try:
            commands = self._store.commands
            self._store.post(commands.answers_sent(self._sent, self._unknown, at=self._clock.now()))
        except NotReady:
            self._note_later()
        else:
            self._sent, self._unknown = set(), set()
