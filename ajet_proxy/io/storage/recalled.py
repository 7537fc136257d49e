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
Question = tuple[str, tuple[Any, ...]]
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
        found: Episode | None = self._ask("episode", name)
        return found

    def batch(self, name: str) -> LeasedBatch | None:
        found: LeasedBatch | None = self._ask("batch", name)
        return found

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterable[Episode]:
        found: Iterable[Episode] = self._ask("latest", state, task, before, limit)
        return found

    async def decide(self, command: Callable[[], T], unknown: Collection[str] = ()) -> T:
        """What `command` returns, which changes nothing: it is given again for each thing that had to be read, which is
        done in a thread. Episodes that are `unknown` are in no archive."""
        read: dict[Question, Any] = {("episode", (name,)): None for name in unknown}
        while True:
            try:
                self._read = read
                return command()
            except Unread as unread:
                question = unread.question
            finally:
                self._read = {}
            read[question] = await asyncio.to_thread(self._answer, question)

    def _ask(self, method: str, *given: Any) -> Any:
        question = method, given
        if threading.get_ident() != self._thread:
            return self._answer(question)
        if question not in self._read:
            raise Unread(question)
        return self._read[question]

    def _answer(self, question: Question) -> Any:
        method, given = question
        return getattr(self._file, method)(*given)
