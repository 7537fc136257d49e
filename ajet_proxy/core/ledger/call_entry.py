"""The calls of an episode as it knows them, and the timelines that it keeps once it is merged."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from ajet_proxy.core.trajectory.timeline import Turn


class Asked(Struct, frozen=True, eq=False):
    """A request as it was asked. Its calls, one for each choice, share this one object. So they are recognized as its
    calls, and many choices cost no more than one."""

    started_at: float
    model: str
    agent: str
    identified_by: str
    body_hash: str
    idempotency_key: str | None
    retries: int = 0
    said: str = ""
    number: int = 0
    """Among those of its episode, from 1."""
    updates: int = 0
    """How many events had been by then that may change a policy version."""


@dataclass(slots=True)
class CallEntry:
    """A call as its episode knows it. ``state`` is running, complete or lost (then with its ``reason``). A complete
    call has its `turn`. Until its episode is merged it also has the number of its `text`, whose first ``turn.end``
    tokens are the call's own. A complete call that a retry replaced keeps its `text` alone. It was
    sampled between the first and the last of `branches` (`ajet_proxy.core.ledger.births`). If its engine may have gone
    on with weights that nobody had announced, its tokens may be from one version further: it is `ahead`."""

    asked: Asked
    state: str = "running"
    reason: str | None = None
    turn: Turn | None = None
    text: int | None = None
    doubtful: bool = False
    branches: tuple[int, int] = (0, 0)
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """A timeline as its episode keeps it: its tokens are the beginning of a text, up to the end of its last turn."""

    text: int
    turns: tuple[Turn, ...]
    broken_by: str | None
