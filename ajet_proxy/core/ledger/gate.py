"""The gate: while it is closed, requests for the model wait so that weights can change.

It is ``open``, ``closing`` (closed to newcomers while calls are still in flight) or ``closed`` (nothing in flight).
Only the trainer closes and opens it; between ``closing`` and ``closed`` stands the number of calls in flight and no
event. It stays closed over a restart of the proxy, because the weights may be half written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import MAX_VERSION

GateState = Literal["open", "closing", "closed"]


@dataclass(frozen=True, slots=True)
class Gate:
    """``since`` is when it was last closed or opened, in Unix seconds; ``reason`` is the trainer's word for closing."""

    shut: bool = False
    since: float = 0.0
    reason: str | None = None

    def close(self, at: float, reason: str) -> Gate:
        """Closing a closed gate changes nothing."""
        return self if self.shut else Gate(True, at, reason)

    def open(self, at: float) -> Gate:
        """Opening an open gate changes nothing."""
        return Gate(False, at) if self.shut else self

    def state(self, in_flight: int) -> GateState:
        if not self.shut:
            return "open"
        return "closing" if in_flight else "closed"


def check_version(version: int, param: str) -> None:
    """`BadRequest` for what is no policy version."""
    if not 0 <= version <= MAX_VERSION:
        raise BadRequest(f"{param} must be 0 to {MAX_VERSION}", param=param)
