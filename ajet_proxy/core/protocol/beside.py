"""Reads an answer that is not captured beside its way to the client, to know whether its client was answered.

Whether a call can be trained does not matter to the agent that made it. So the reader of its dialect tells how its
answer ended, as it does of a captured one. What the reader shows is dropped: the bytes pass as they came.

Invariant: nothing in an answer makes the reading fail. Of what is too large nothing is said.
"""

from __future__ import annotations

from ajet_proxy.core.protocol.dialect import Reader
from ajet_proxy.core.protocol.sse import SseEvent, SseParser
from ajet_proxy.core.trajectory.call import CAPTURE_FAILED, ENGINE_ABORTED, ENGINE_ERROR, TRUNCATED, Lost

MOST = 32 << 20
"""A longer document, or event of a stream, is not kept."""
_FAILURES = (ENGINE_ERROR, ENGINE_ABORTED, TRUNCATED)


class Beside:
    """Has `reader` read an answer that is fed piece by piece: the events of a `stream`, or one document."""

    def __init__(self, reader: Reader, *, stream: bool) -> None:
        self.gave_up = False
        """True if it was too large."""
        self._reader = reader
        self._parser = SseParser() if stream else None
        self._kept: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Takes the next piece."""
        if self.gave_up:
            return
        if self._parser is None:
            self._kept.append(data)
            self._size += len(data)
        else:
            self._show(self._parser.feed(data))
            self._size = len(self._parser.unfinished)
        if self._size > MOST:
            self.gave_up, self._kept, self._parser = True, [], None

    def finish(self) -> None:
        """The answer has ended as it should."""
        if self._parser is not None:
            self._show(self._parser.finish())
        elif not self.gave_up:
            try:
                self._reader.document(b"".join(self._kept))
            except Exception:  # as in `Exchange`: an answer that cannot be read costs the agent nothing
                self._reader.spoil(CAPTURE_FAILED)

    def _show(self, events: list[SseEvent]) -> None:
        for event in events:
            try:
                self._reader.show(event)
            except Exception:  # as in finish
                self._reader.spoil(CAPTURE_FAILED)


def failure(reader: Reader) -> str | None:
    """Why the client of the answer that `reader` has read has no answer, if it has none."""
    for outcome, said in zip(reader.outcomes(), reader.answers(), strict=True):
        if isinstance(outcome, Lost) and (
            outcome.reason in _FAILURES or (outcome.reason == CAPTURE_FAILED and said is None)
        ):
            return outcome.reason
    return None
