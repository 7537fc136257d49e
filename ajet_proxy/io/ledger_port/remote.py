"""The `LedgerPort` of a worker: the ledger is in another process, and every question to it is a message.

A call costs two round trips: it begins (which may take as long as the gate is closed), and its end is on disk. What a
worker has to know at every moment (which weights serve, where the engines are, which keys hold) it is told as `Facts`,
before anything that depends on them: word and answers come in the order in which they were sent.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace

from ajet_proxy.core.continuity.memory import Known, Outcome, Sought
from ajet_proxy.core.conversation.history import Beginnings, ChatHistory, Mark, Marks, PromptHistory, ResponseHistory
from ajet_proxy.core.identity.headers import RewardDirective
from ajet_proxy.core.identity.keys import Claims, Ring
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.core.protocol.reading import Ask
from ajet_proxy.core.trajectory.call import ENGINE_ERROR
from ajet_proxy.core.trajectory.timeline import Packed, Policy, Turn
from ajet_proxy.io.ledger_port.cancellation import OverTold, nobody
from ajet_proxy.io.ledger_port.channel import Channel, Form, Values, fields
from ajet_proxy.io.ledger_port.port import Asking, Begun, Ending, Gone, Whole
from ajet_sdk.errors import AjetError


class Facts(Struct, frozen=True):
    """What every worker knows. ``served`` has the version and the engines of each model that was announced; ``daemon``
    is the daemon's name, which no other one has."""

    served: Mapping[str, tuple[int, tuple[str, ...]]]
    default_version: int
    merge_policy: Policy
    ring: Ring
    daemon: str

    def policy_version(self, model: str) -> int:
        """As the ledger has it."""
        return self.served[model][0] if model in self.served else self.default_version

    def upstreams(self, model: str) -> tuple[str, ...]:
        """The engines announced for `model`."""
        return self.served[model][1] if model in self.served else ()

    def models(self) -> tuple[str, ...]:
        """Every model that was announced."""
        return tuple(self.served)


def _marks(packed: Sequence[Any]) -> tuple[Mark, ...]:
    return tuple(Mark(*mark) for mark in packed)


def _known_marks(kind: type[ChatHistory]) -> Form:
    """The history of a chat crosses as the marks in it."""
    return Form(kind, lambda history: list(history.beginnings(())), lambda packed: Marks(_marks(packed)))


VALUES = Values((
    fields(Claims), fields(RewardDirective), fields(Identity), fields(Begun), fields(Known), fields(Turn),
    fields(Packed), fields(Facts), fields(Ask),
    Form(Asking, lambda asking: [*astuple(replace(asking, sent=dict(asking.sent)))], lambda told: Asking(*told)),
    _known_marks(ChatHistory), _known_marks(ResponseHistory), fields(PromptHistory),
    Form(Whole, lambda end: [end.episode, end.call, end.marks, end.engine],
         lambda told: Whole(told[0], told[1], _marks(told[2]), told[3])),
    Form(Gone, lambda end: [end.episode, end.call, end.reason, end.marks, end.engine, end.taken_back],
         lambda told: Gone(told[0], told[1], told[2], _marks(told[3]), *told[4:])),
    Form(Ring, lambda ring: [ring.secrets, sorted(ring.keys), dict(ring.tenants), dict(ring.episodes)],
         lambda told: Ring(told[0], frozenset(told[1]), *told[2:])),
))  # fmt: skip
"""What crosses between the ledger's process and its workers."""


class RemotePort:
    """Asks over `channel`. `facts` are replaced by whoever is told them."""

    def __init__(self, channel: Channel, facts: Facts) -> None:
        self._channel = channel
        self._entries = itertools.count(1)
        self._over: dict[int, OverTold] = {}
        self.facts = facts

    @property
    def merge_policy(self) -> Policy:
        return self.facts.merge_policy

    def policy_version(self, model: str) -> int:
        return self.facts.policy_version(model)

    @property
    def weights(self) -> object:
        return self.facts

    async def find(self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]) -> Identity:
        return replace(identity, episode=await self._channel.ask("find", identity, history, dict(sent)))

    async def reward(self, identity: Identity, name: str, again: bool | None) -> None:
        await self._channel.ask("reward", identity, name, again)

    @asynccontextmanager
    async def enter(self, model: str, episode: str = "", over: OverTold = nobody) -> AsyncIterator[None]:
        entry = next(self._entries)
        self._over[entry] = over
        try:
            await self._channel.ask("enter", entry, model, episode)
            yield
        finally:
            del self._over[entry]
            self._channel.tell("leave", entry)

    @asynccontextmanager
    async def begin(self, asking: Asking, over: OverTold) -> AsyncIterator[Begun]:
        entry = next(self._entries)
        self._over[entry] = over  # which may be told before this task hears that it has begun
        try:
            begun: Begun = await self._channel.ask("begin", entry, asking)
            try:
                yield begun
            except AjetError:
                self.lose([Gone(begun.episode, call, ENGINE_ERROR) for call in begun.calls])
                raise
        finally:
            del self._over[entry]
            self._channel.tell("leave", entry)

    def over(self, entry: int) -> None:
        """The episode of what was begun as `entry` is discarded."""
        if (told := self._over.get(entry)) is not None:
            told()

    def missed(self, tenant: str | None) -> None:
        self._channel.tell("missed", tenant)

    def sent(self, calls: Sequence[str]) -> None:
        self._channel.tell("sent", *calls)

    def unknown(self, calls: Sequence[str]) -> None:
        """Only the ledger's side outlives the process that had them."""
        raise NotImplementedError

    async def end(self, endings: Sequence[Ending]) -> None:
        await self._channel.ask("end", *endings)

    def lose(self, endings: Sequence[Ending]) -> None:
        self._channel.tell("lose", *endings)

    async def admit(self, identity: Identity) -> None:
        await self._channel.ask("admit", identity)

    def used(self, tenant: str, tokens: int) -> None:
        self._channel.tell("used", tenant, tokens)

    async def recall(self, sought: Sought, episode: str) -> tuple[Known, Packed] | Outcome:
        if sought.end is None:
            return "first_turn"
        found: tuple[Known, Packed] | Outcome = await self._channel.ask("recall", sought, episode)
        return found

    def remember(self, ends: Sequence[tuple[bytes, Outcome | None]], shape: bytes, call: str, ended: str) -> None:
        self._channel.tell("remember", ends, shape, call, ended)

    def keep(self, response: str, ask: Ask) -> None:
        self._channel.tell("keep", response, ask)

    async def kept(self, response: str) -> Ask | None:
        ask: Ask | None = await self._channel.ask("kept", response)
        return ask

    async def complete(self, episode: str, model: str, agent: str) -> Sequence[Packed]:
        found: Sequence[Packed] = await self._channel.ask("complete", episode, model, agent)
        return found
