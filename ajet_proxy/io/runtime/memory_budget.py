"""The memory that bodies of requests may take while they come in, where `max_memory` limits it.

What the process holds is measured once a second, which is too late for bodies. A caller sends hundreds of megabytes in
that time, and may leave all its requests unfinished. So bodies are counted as they come, and one for which there is no
room is not read on. A whole body counts until the next measurement, which then sees it.

Small bodies are always read: those of rewards and acknowledgements are small, and they are what makes room.
"""

from __future__ import annotations

from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.errors import NotReady

RETRY_AFTER_S = 10.0
SMALL = 64 << 10
"""Bodies of so many bytes are not asked whether there is room. aiohttp takes in about as much of each unasked."""


class MemoryBudget:
    """The bytes that bodies may still take in this process; without a `look`, as many as they want."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._most: int | None = None
        self._taken = 0
        self._whole = 0

    def look(self, left: int) -> None:
        """From now on the process may take `left` bytes more than it holds now."""
        self._taken -= self._whole
        self._whole = 0
        self._most = self._taken + max(0, left)

    def check(self, size: int, more: int = 0) -> None:
        """`NotReady` if there is no room for `more` bytes of a body that has, or will have, `size` bytes."""
        if size > SMALL and self._most is not None and self._taken + more > self._most:
            self._metrics.inc("ajet_refused_total", reason="memory")
            raise NotReady(
                f"the proxy has no memory left for a body of more than {SMALL} bytes: come back later",
                code="memory_limit", retry_after=RETRY_AFTER_S,
            )

    def take(self, size: int) -> None:
        """Count `size` bytes of a body that came."""
        self._taken += size

    def leave(self, size: int, *, whole: bool) -> None:
        """No more comes of a body of `size` bytes. It is `whole`, or it is let go."""
        if whole and self._most is not None:
            self._whole += size
        else:
            self._taken -= size
