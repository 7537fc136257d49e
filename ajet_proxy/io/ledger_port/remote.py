"""The `LedgerPort` of a worker: the ledger is in another process, and every question to it is a message.

A call costs two round trips: it begins (which may take as long as the gate is closed), and its end is on disk. A worker
must always know which weights serve, where the engines are and which keys are valid. These are sent to it as `Facts`,
before anything that depends on them: notices and answers come in the order in which they were sent.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace

from ajet_proxy.core.continuity.memory import Known, Outcome, Sought
from ajet_proxy.core.conversation.history import Beginnings, ChatHistory, Mark, Marks, PromptHistory
from ajet_proxy.core.identity.headers import Labels
from ajet_proxy.core.identity.keys import Claims, Ring
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.core.ledger.weights import Candidate, Served, Serving
from ajet_proxy.core.protocol.dialect import Ask
from ajet_proxy.core.protocol.responses.history import ResponseHistory
from ajet_proxy.core.trajectory.timeline import Packed, Policy, Turn
from ajet_proxy.io.ledger_port.cancellation import OnDiscard, ignore
from ajet_proxy.io.ledger_port.port import Begun, CallRequest, Gone, Whole, why_lost
from ajet_proxy.io.ledger_port.worker_connection import Form, Values, WorkerConnection, fields
from ajet_sdk.routes import Reward


class Facts(Serving, Struct, frozen=True):
    """The facts that every worker knows. ``daemon`` is the daemon's name, which no other one has."""

    served: Mapping[str, Served]
    candidates: Mapping[str, Candidate]
    default_version: int
    policy_updates: int
    merge_policy: Policy
    ring: Ring
    daemon: str


def _marks(packed: Sequence[Any]) -> tuple[Mark, ...]:
    return tuple(Mark(*mark) for mark in packed)


def _known_marks(kind: type[ChatHistory]) -> Form:
    """The history of a chat crosses as the marks in it."""
    return Form(kind, lambda history: list(history.beginnings(())), lambda packed: Marks(_marks(packed)))


VALUES = Values((
    fields(Claims), fields(Labels), fields(Identity), fields(Begun), fields(Known), fields(Turn), fields(Packed),
    fields(Served), fields(Candidate), fields(Facts), fields(Ask),
    Form(Reward, dataclasses.astuple, lambda packed: Reward(*packed)),
    Form(CallRequest, lambda request: [*astuple(replace(request, sent=dict(request.sent)))],
         lambda packed: CallRequest(*packed)),
    _known_marks(ChatHistory), _known_marks(ResponseHistory), fields(PromptHistory),
    Form(Whole, astuple,
         lambda packed: Whole(packed[0], packed[1], _marks(packed[2]), *packed[3:])),
    Form(Gone, astuple,
         lambda packed: Gone(packed[0], packed[1], packed[2], _marks(packed[3]), *packed[4:])),
    Form(Ring, lambda ring: [ring.secrets, sorted(ring.keys), dict(ring.tenants), dict(ring.episodes)],
         lambda packed: Ring(packed[0], frozenset(packed[1]), *packed[2:])),
))  # fmt: skip
"""The values that cross between the ledger's process and its workers."""


QUESTIONS = ("withdraw", "reward", "end", "model_for", "admit", "kept", "nearest")
NOTICES = ("unserved", "unread", "sent", "lose", "used", "remember", "keep")
"""Methods of a `LedgerPort` that cross as they are."""


def _question(name: str) -> Any:
    """A method of a `LedgerPort` that is asked under its own name."""

    async def ask(port: RemotePort, *values: Any) -> Any:
        return await port.connection.ask(name, *values)

    return ask


def _notice(name: str) -> Any:
    """A method of a `LedgerPort` that answers nothing."""

    def notify(port: RemotePort, *values: Any) -> None:
        port.connection.notify(name, *values)

    return notify


class RemotePort:
    """Asks over `connection`. `serving` is `facts` until others come."""

    withdraw, reward, end, model_for, admit, kept, nearest = map(_question, QUESTIONS)
    unserved, unread, sent, lose, used, remember, keep = map(_notice, NOTICES)

    def __init__(self, connection: WorkerConnection, facts: Facts) -> None:
        self.connection = connection
        self._entries = itertools.count(1)
        self._on_discard: dict[int, OnDiscard] = {}
        self.serving = facts

    def enter(self, model: str, episode: str = "", on_discard: OnDiscard = ignore) -> AbstractAsyncContextManager[None]:
        return self._inside("enter", on_discard, model, episode)

    @asynccontextmanager
    async def begin(self, request: CallRequest, on_discard: OnDiscard) -> AsyncIterator[Begun]:
        async with self._inside("begin", on_discard, request) as begun:
            try:
                yield begun
            except Exception as error:
                reason, status = why_lost(error)
                self.lose([Gone(begun.episode, call, reason, status=status) for call in begun.calls])
                raise

    @asynccontextmanager
    async def _inside(self, what: str, on_discard: OnDiscard, *values: Any) -> AsyncIterator[Any]:
        """A block that begins with the answer to `what`, and at whose end the other side leaves, too."""
        entry = next(self._entries)
        self._on_discard[entry] = on_discard  # which may be called before this task hears that it has begun
        try:
            yield await self.connection.ask(what, entry, *values)
        finally:
            del self._on_discard[entry]
            self.connection.notify("leave", entry)

    def discarded(self, entry: int) -> None:
        """The episode of what was begun as `entry` is discarded."""
        if (on_discard := self._on_discard.get(entry)) is not None:
            on_discard()

    async def find(self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]) -> Identity:
        found: Identity = await self.connection.ask("find", identity, history, dict(sent))
        return found

    async def recall(self, sought: Sought, episode: str) -> tuple[Known, Packed] | Outcome:
        if sought.end is None:
            return "first_turn"
        found: tuple[Known, Packed] | Outcome = await self.connection.ask("recall", sought, episode)
        return found
