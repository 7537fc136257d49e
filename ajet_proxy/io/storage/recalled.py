"""The archive as the ledger asks it: in memory, or not yet read.

A command or a view is a pure function, and runs on the event loop, which waits for no disk. So it finds in the archive
only what was read beforehand, and `Unread` is raised where it asks for more. Whoever gives the command reads that in
a thread, and gives it again (`Store.decide`). Nothing has changed by then, and whatever
happened in between is seen.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.io.storage.archive import ArchiveFile

T = TypeVar("T")
Question = tuple[Callable[..., Any], tuple[Any, ...]]
"""A method of `ArchiveFile`, and what it is given."""


class Unread(Exception):
    """The archive was asked something that was not read beforehand."""

    def __init__(self, question: Question) -> None:
        super().__init__(f"nobody has read {question}")
        self.question = question


class Recalled:
    """The archive for the thread that makes it. Other threads may wait for the disk, and ask the file itself."""

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        self._thread = threading.get_ident()
        self._read: dict[Question, Any] = {}

    def episode(self, name: str) -> Episode | None:
        return self._ask(self._file.episode, name)

    def batch(self, name: str) -> LeasedBatch | None:
        return self._ask(self._file.batch, name)

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterable[Episode]:
        return self._ask(self._file.latest, state, task, before, limit)

    async def decide(self, command: Callable[[], T], unknown: Collection[str] = ()) -> T:
        """Return what `command` returns, which changes nothing: it is given again for each thing that had to be read,
        which is done in a thread. Episodes that are `unknown` are in no archive."""
        read: dict[Question, Any] = {(self._file.episode, (name,)): None for name in unknown}
        while True:
            try:
                self._read = read
                return command()
            except Unread as unread:
                method, given = unread.question
            finally:
                self._read = {}
            read[method, given] = await asyncio.to_thread(method, *given)

    def _ask(self, method: Callable[..., T], *given: Any) -> T:
        if threading.get_ident() != self._thread:
            return method(*given)
        if (method, given) not in self._read:
            raise Unread((method, given))
        found: T = self._read[method, given]
        return found
