"""The answer of an engine that speaks the Messages API itself. It tells no token ids, so all that is read of it is how
it ended: a stop reason and, in a stream, ``message_stop``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.protocol.dialect import DONE, Reader
from ajet_proxy.core.protocol.reading import LOSSES
from ajet_proxy.core.protocol.sse import SseEvent
from ajet_proxy.core.trajectory.call import ENGINE_ERROR, NO_CHAT_ROUTE, TRUNCATED, Lost, Outcome

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class OwnReading(Reader):
    """The `Reader` of one such answer. It changes nothing."""

    def __init__(self) -> None:
        self._stop_reason: Any = None

    @property
    def sampled(self) -> tuple[int, ...]:
        return (0,)

    def usual(self, stream: bytes) -> tuple[list[bytes], int]:
        return [], 0

    def show(self, event: SseEvent) -> bytes | None:
        if event.data and event.data.strip() != DONE:
            said = json.loads(event.data)
            self._look(said, said.get("delta") or {} if said.get("type") == "message_delta" else {})
            self.ended = self.ended or said.get("type") == "message_stop"
        return event.raw

    def keep_alive(self, *, held: bool) -> bytes:
        return b"" if self.ended and not held else PING

    def document(self, body: bytes) -> bytes:
        said = json.loads(body)
        self._look(said, said)
        self.ended = True
        return body

    def outcomes(self) -> tuple[Outcome, ...]:
        told = LOSSES.get(self._stop_reason, NO_CHAT_ROUTE) if self.ended and self._stop_reason else TRUNCATED
        return (Lost(0, self.spoilt or told),)

    def answers(self) -> tuple[Mapping[str, Any] | None, ...]:
        return ({"stop_reason": self._stop_reason} if self._stop_reason else None,)

    def _look(self, said: Mapping[str, Any], ending: Mapping[str, Any]) -> None:
        """Note whether what is `said` is an error, and the stop reason that is `ending` it."""
        if said.get("type") == "error" or said.get("error"):
            self.spoil(ENGINE_ERROR)
        reason = ending.get("stop_reason")
        self._stop_reason = reason if isinstance(reason, str) and reason else self._stop_reason
