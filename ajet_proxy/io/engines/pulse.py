"""Signs of life of an engine that sends nothing.

A client that gives up by its own timeout may have met an engine that is dead, or a policy that rambles. The two look
alike where an answer comes in one piece. So while requests wait and nothing comes of an engine, not even for others, it
is asked for ``/health``. What it sends, and any answer to that below 500, is a sign of life.

The first look is after `FIRST_S` of silence. While looks are answered and nothing else comes, each pause is twice the
one before, up to `MOST_S`. What came before a silence does not count, because an engine may die within an answer. A
stream costs no more than setting a flag for each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Self

TICK_S: Final = 0.25
FIRST_S: Final = 0.25
MOST_S: Final = 5.0
LOOK_S: Final = 10.0
"""A look is not waited for any longer."""
DEAF_S: Final = 10.0
"""An engine is taken for dead that has shown no sign of life for this long, or for half of what its client waited."""


class Pulse:
    """The health of one engine, which `look` looks at."""

    def __init__(self, look: Callable[[], Awaitable[bool]]) -> None:
        self.beat = False
        """To be set whenever something comes of the engine."""
        self._look = look
        self._listening = 0
        self._pause = FIRST_S
        self._silent_since: float | None = None
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        """A block in which a request waits for the engine."""
        self._listening += 1
        self._pause = FIRST_S
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    def __exit__(self, *_: object) -> None:
        self._listening -= 1

    def is_dead(self, waited_s: float) -> bool:
        """Tell whether a client that has waited for `waited_s` seconds was right to take the engine for dead."""
        if self.beat or self._silent_since is None:
            return False
        return asyncio.get_running_loop().time() - self._silent_since >= min(waited_s / 2, DEAF_S)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        loop, quiet = asyncio.get_running_loop(), 0.0
        try:
            while self._listening:
                await asyncio.sleep(TICK_S)
                if self.beat:
                    self.beat, self._silent_since, quiet, self._pause = False, None, 0.0, FIRST_S
                    continue
                quiet += TICK_S
                if quiet < self._pause:
                    continue
                quiet = 0.0
                if self._silent_since is None:
                    self._silent_since = loop.time()
                if await self._look():
                    self._silent_since, self._pause = None, min(2 * self._pause, MOST_S)
        finally:
            self._watching, self._silent_since = None, None
