"""The questions of a front to the ledger: where a request belongs, when it may go, and that its calls are on disk.

Idea: everything that a request needs of the daemon's one state is one short question to a `LedgerPort`, without
anything of HTTP. So the front does not know whether the ledger is in its own process
(`ajet_proxy.io.ledger_port.local`) or in another one (`ajet_proxy.io.ledger_port.remote`).

Invariant: no call is running after its ``begin`` block. `end` returns when the calls are on disk. If the disk does not
take them they are lost, because their client is not sent the end of its answer. Whoever is cancelled in it says why
they are lost (`lose`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from ajet_proxy.core.continuity.memory import Known, Outcome, Sought
from ajet_proxy.core.conversation.history import Beginnings, Mark
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.core.ledger.attempts import fate
from ajet_proxy.core.ledger.weights import Serving
from ajet_proxy.core.protocol.dialect import Ask
from ajet_proxy.core.trajectory.call import DISCONNECTED, ENGINE_ERROR, REFUSED
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.ledger_port.cancellation import OnDiscard, ignore
from ajet_sdk.errors import AjetError


class CallRequest(Struct, frozen=True):
    """A request to `route` that may become calls, one for each of its `choices`. ``history`` counts only if nothing
    names an episode, or a name that may be shared. ``sent`` has its retry keys (`core.identity.headers`); ``model`` is
    the one that it asks for. ``said`` is what it says (`core.ledger.attempts`). ``prompt`` is a digest of that which is
    the same for everybody, where an episode may need it; else it is empty. ``begins`` says that it has no answer in its
    history, and ``probe`` that it is one (`core.protocol.dialect`)."""

    identity: Identity
    history: Beginnings | None
    sent: Mapping[str, Any]
    model: str
    choices: int
    route: str
    said: str = ""
    prompt: str = ""
    begins: bool = False
    probe: bool = False


class Begun(Struct, frozen=True):
    """Calls that have begun. ``episode_model`` is the model that their episode was opened for, if it was for one.
    ``gate_since`` is when its model's gate was last opened or closed, 0 if never. ``open`` has what earlier requests of
    that agent said that are not answered yet. ``identified_by`` is the way that told the episode."""

    calls: tuple[str, ...]
    episode: str
    model: str
    episode_model: str | None
    agent: str
    started_at: float
    policy_version: int
    gate_since: float
    open: tuple[str, ...] = ()
    identified_by: str = "path"


class Whole(Struct, frozen=True):
    """A call that ended well. ``engine`` is the address of the route that answered. ``begins`` is what of
    `Begun.open` its request begins with."""

    episode: str
    call: Packed
    marks: tuple[Mark, ...] = ()
    engine: str = ""
    begins: tuple[str, ...] = ()


class Gone(Struct, frozen=True):
    """A call that is lost; with ``taken_back`` even if it ended well before. ``engine`` is the address of the route
    that answered, if one did, and ``status`` that with which it refused. ``begins`` is as of a `Whole`."""

    episode: str
    call: str
    reason: str
    marks: tuple[Mark, ...] = ()
    engine: str = ""
    taken_back: bool = False
    begins: tuple[str, ...] = ()
    status: int = 0


Ending = Whole | Gone


def is_ours(error: AjetError) -> bool:
    """True if `error` is a failure of ours, or of the engines, and not of what the client sent."""
    return fails(error.status)


def fails(status: int) -> bool:
    """Tell whether a server of that `status` failed itself. One that has no such route (501) did not."""
    return status == 429 or (status >= 500 and status != 501)


def why_lost(error: BaseException) -> tuple[str, int]:
    """Why calls are lost whose request ends with `error` before an engine has answered, and its status if what the
    client sent was refused."""
    if isinstance(error, AjetError) and not is_ours(error):
        return REFUSED, error.status
    return DISCONNECTED if isinstance(error, asyncio.CancelledError | ConnectionError) else ENGINE_ERROR, 0


def taken_back(endings: Sequence[Ending], reason: str) -> list[Ending]:
    """The endings of calls that ended in `endings` and are lost after all, for `reason`. Their client was not sent the
    end, or the engine contradicted it."""
    return [Gone(end.episode, end.call.turn.call, reason, taken_back=True) for end in endings if isinstance(end, Whole)]


def unsent(endings: Sequence[Ending], reason: str) -> list[Ending]:
    """The endings of calls whose client was not sent the end, for `reason`. If none of them is whole, these are those
    that were lost although there was an answer."""
    return taken_back(endings, reason) or [
        Gone(end.episode, end.call, reason, taken_back=True)
        for end in endings if isinstance(end, Gone) and fate(end.reason) == "answered"
    ]


class LedgerPort(Protocol):
    """The ledger, as a front sees it."""

    @property
    def serving(self) -> Serving:
        """Which weights serve now, and how calls become samples."""

    async def find(self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]) -> Identity:
        """`identity` with the episode that its name stands for, or that the request continues, if there is one."""

    async def withdraw(self, identity: Identity) -> None:
        """Learn nothing from the chat that the name of `identity` stands for, although its request makes no call.
        Returns when that is on disk."""

    async def reward(self, identity: Identity, name: str, again: bool | None) -> None:
        """Record the reward of `identity`, as `find` returned it; a name opens its episode on first sight. `name` is
        the reward's id. If only its content names it, `again` tells whether it was sent before, and it gets a
        number."""

    async def model_for(self, identity: Identity, asked: str) -> str | None:
        """The model to which a call of `identity`, as `find` returned it, goes that asks for the model `asked`; None if
        its episode was opened for none."""

    async def admit(self, identity: Identity) -> None:
        """Count a request that makes no call for its tenant's quota; `OverQuota` if that has no room for it. The key of
        an episode that takes no calls is refused as for a call. A request that rewards is not: what it may reward
        decides."""

    def used(self, tenant: str, tokens: int) -> None:
        """Count the tokens that came of such a request."""

    def enter(self, model: str, episode: str = "", on_discard: OnDiscard = ignore) -> AbstractAsyncContextManager[None]:
        """Hold a request while weights change, and until there is an engine for `model`. `on_discard` is
        called if its `episode` is discarded while it is inside."""

    def begin(self, request: CallRequest, on_discard: OnDiscard) -> AbstractAsyncContextManager[Begun]:
        """`enter`, and begin the calls of a request. Those that have not ended when the block is left are lost.
        `on_discard` is called when their episode is discarded before that."""

    def unserved(self, identity: Identity, model: str, code: str) -> None:
        """A request of `identity` to a captured route became no call, because we answered it with the error `code`.
        `model` is the one that it asks for; empty also if that was not read."""

    def unread(self, tenant: str | None) -> None:
        """A request of `tenant` (None: of anybody) may have come unread; its client will send it again."""

    def sent(self, calls: Sequence[str]) -> None:
        """The client of these calls, which are on disk, has been sent the end of its answer."""

    async def end(self, endings: Sequence[Ending]) -> None:
        """Record how calls ended; returns when that is on disk. `NotReady` if the disk does not take it in time."""

    def lose(self, endings: Sequence[Ending]) -> None:
        """Record how calls ended, without waiting for the disk."""

    async def recall(self, sought: Sought, episode: str) -> tuple[Known, Packed] | Outcome:
        """The call that a request continues, with its text. If there is none: a word of `core.continuity.memory` for
        why."""

    def remember(self, ends: Sequence[tuple[bytes, Outcome | None]], shape: bytes, call: str, ended: str) -> None:
        """`call` was answered; see `core.continuity.memory.Memory`."""

    def keep(self, response: str, ask: Ask) -> None:
        """Note that the engine may keep `response`, which answered `ask`."""

    async def kept(self, response: str) -> Ask | None:
        """The request for a response that the engine keeps, if that is remembered."""

    async def nearest(self, episode: str, model: str, agent: str, prompt: bytes) -> Sequence[Packed]:
        """The complete calls of an `agent` to a `model` that share the longest beginnings with `prompt`, as many as are
        `TRIED`, while their episode takes calls."""
