"""Requests that end before their answer does, because their episode is discarded meanwhile.

What cannot be trained must not hold a gate: an engine that hangs never answers, and its client may wait forever. So the
task that serves such a request is cancelled, as it is when its client goes away. That ends the engine's work too. Here
the client is still there, and is told why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from aiohttp import web

from ajet_sdk.errors import Conflict

OnDiscard = Callable[[], None]


def ignore() -> None:
    """Does nothing, for a request that goes on although its episode is discarded."""


class CallOff:
    """A context around what the running task does for `http`. `now` ends that with a `Conflict`."""

    def __init__(self, http: web.Request) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()
        self.called = False
        http[_KEY] = self

    def now(self) -> None:
        if self._task is not None and not self.called:
            self.called = self._task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self.called or task is None or task.uncancel() > self._before:
            return  # the client went away as well
        if isinstance(error, asyncio.CancelledError):
            raise Conflict("the episode was discarded while this call ran", code="episode_discarded") from error


_KEY = web.RequestKey("call_off", CallOff)


def called_off(http: web.Request) -> bool:
    """True if the episode of `http` was discarded while it ran."""
    return _KEY in http and http[_KEY].called


class DiscardWatch:
    """Whom to tell that an episode is discarded."""

    def __init__(self) -> None:
        self._watching: dict[str, list[OnDiscard]] = {}

    @contextmanager
    def watched(self, episode: str, on_discard: OnDiscard) -> Iterator[None]:
        """A block in which `on_discard` is called when `episode` is discarded."""
        watching = self._watching.setdefault(episode, [])
        watching.append(on_discard)
        try:
            yield
        finally:
            watching.remove(on_discard)
            if not watching:
                del self._watching[episode]

    def discarded(self, episode: str) -> None:
        """Tell those who watch that `episode` is discarded."""
        for on_discard in tuple(self._watching.get(episode, ())):
            on_discard()
