"""The `LedgerPort` of the process that has the ledger.

Its answers are the ledger's, and what it is told becomes events, which `Store` puts on disk.

Next: ajet_proxy/core/ledger/commands.py
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace
from yarl import URL

from ajet_proxy.core.continuity.memory import UNKNOWN_HISTORY, Known, Memory, Sought
from ajet_proxy.core.conversation.history import Beginnings
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.core.ledger.engine_alerts import Telling
from ajet_proxy.core.ledger.episode import takes
from ajet_proxy.core.ledger.events import (
    CallFinished,
    CallLost,
    EpisodeDiscarded,
    EpisodeOpened,
    EpisodesArchived,
    EpisodeSealed,
    Event,
    GateOpened,
    PolicyAnnounced,
)
from ajet_proxy.core.ledger.missed import Missed
from ajet_proxy.core.ledger.session_names import RUNGS, Names
from ajet_proxy.core.protocol.kept_responses import Retold
from ajet_proxy.core.protocol.reading import Ask
from ajet_proxy.core.trajectory.call import DISCONNECTED, ENGINE_ERROR, NOT_WRITTEN
from ajet_proxy.core.trajectory.timeline import Packed, Policy
from ajet_proxy.io.engines.pool import Engines
from ajet_proxy.io.ledger_port.cancellation import OverTold, UnderWay, nobody
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper, Inside
from ajet_proxy.io.ledger_port.port import Asking, Begun, Ending, Gone, Whole, taken_back
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import AjetError, BadRequest, Forbidden, NotFound, NotReady
from ajet_sdk.routes import HEADER_REWARD, OpenEpisode, Reward

logger = logging.getLogger(__name__)

UNSURE = (*RUNGS, "lineage")
"""Ways that name no episode for good: while a request waits for the gate, theirs may end and another one begin."""
SENT_S = 0.25
"""So often it is put on record at most whose answers have been sent."""
MAX_NOTED = 10
"""An episode notes at most so many others that its first call may have continued."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class LocalPort:
    """The `LedgerPort` of the process that has the ledger."""

    def __init__(self, *, store: Store, gate: Gatekeeper, engines: Engines, clock: Clock, metrics: Metrics) -> None:
        self._store = store
        self._gate = gate
        self._engines = engines
        self._clock = clock
        self._metrics = metrics
        self._memory = Memory()
        self._names = Names(store.ledger.episodes.values())
        self._missed = Missed(clock.now())
        self._sent: set[str] = set()
        self._unknown: set[str] = set()
        self._noting: asyncio.TimerHandle | None = None
        self._closed = False
        self._under_way = UnderWay()
        store.listen(self._heard)
        self._retold = Retold()
        self._telling = Telling(store.trouble)

    @property
    def merge_policy(self) -> Policy:
        return self._store.ledger.merge_policy

    def policy_version(self, model: str) -> int:
        return self._store.ledger.policy_version(model)

    @property
    def weights(self) -> object:
        return self._store.ledger.updates

    async def find(self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]) -> Identity:
        found = self._continued(self._current(identity), history, sent)[0]
        if found.episode is not None and self._store.ledger.tenant_of(found.episode) is not None:
            self._tenant(found, found.episode)
        return found

    async def reward(self, identity: Identity, name: str, again: bool | None) -> None:
        assert identity.reward is not None
        episode, ledger = identity.episode, self._store.ledger
        if episode is None:
            raise BadRequest(
                f"{HEADER_REWARD} needs an episode, and this request neither names one nor continues any one",
                param=HEADER_REWARD,
            )
        tenant = self._tenant(identity, episode)
        if ledger.tenant_of(episode) is None:
            if identity.reward.call is not None:
                raise NotFound(f"episode {episode} has no call {identity.reward.call}", code="unknown_call")
            opening = OpenEpisode(task=identity.task, eval=identity.eval)
            await self._store.commit(ledger.open_episode(
                opening, episode=episode, at=self._clock.now(), tenant=tenant, identified_by=identity.identified_by
            ))
        sent, known = (episode, name), ledger.find(episode)
        if again is not None:
            before = sum(given.startswith(name) for given in known.rewards) if known is not None else 0
            repeated = again and not self._missed.explains(sent, int(again), None)
            name = f"{name}-{max(0, before - 1) if repeated else before}"
        given, at = identity.reward, self._clock.now()
        body = Reward(value=given.value, call=given.call, final=given.final)
        labels = ledger.label(episode, task=identity.task, eval=identity.eval, at=at)
        events = (*labels, *ledger.reward(episode, body, reward_id=name, at=at))
        try:
            self._store.check(events)
        except NotReady:
            self._missed.came(sent, int(again or 0), at)
            raise
        if again:
            self._missed.let_in(sent)
        await self._store.commit(events)

    async def admit(self, identity: Identity) -> None:
        episode = identity.claims.episode
        if episode is not None and identity.reward is None:
            self._tenant(identity, episode)
            if (known := self._store.ledger.find(episode)) is not None:
                takes("call", known)
        if self._store.quotas is not None:
            self._store.quotas.pass_one(identity.claims.tenant, self._clock.now())

    def used(self, tenant: str, tokens: int) -> None:
        if self._store.quotas is not None:
            self._store.quotas.use(tenant, tokens, self._clock.now())

    @asynccontextmanager
    async def enter(self, model: str, episode: str = "", over: OverTold = nobody) -> AsyncIterator[None]:
        async with self._come_in(model):
            self._under_way.add(episode, over)
            try:
                yield
            finally:
                self._under_way.remove(episode, over)

    @asynccontextmanager
    async def begin(self, asking: Asking, over: OverTold) -> AsyncIterator[Begun]:
        ledger, named = self._store.ledger, asking.identity
        name, retries = (named.episode or "", asking.sent["body_hash"]), asking.sent["retries"]
        self._missed.came(name, retries, self._clock.now())
        identity, metadata = named, _NOTHING
        if named.reward is None:
            identity, metadata = self._continued(self._current(named), asking.history, asking.sent)
        episode = identity.episode or self._clock.new_id("ep")
        tenant = self._tenant(identity, episode)
        agent = identity.agent or ledger.agent_of(episode) or ""
        given = ledger.model_of(episode, agent, asking.model, self._engines.names())
        model = given or asking.model or ledger.only_model()
        opening = partial(
            ledger.begin_call, model=model, agent=agent, task=identity.task, eval=identity.eval,
            identified_by=identity.identified_by, tenant=tenant, metadata=metadata,
            route=asking.route, **asking.sent,
        )
        if ledger.gate != "open" or not self._engines.candidates(model):  # waiting takes memory
            self._store.check(opening(episode=episode, calls=(), at=self._clock.now()))
        async with self._come_in(model):
            if named.identified_by in UNSURE and named.reward is None and ledger.has_ended(episode):
                episode = self._current(named).episode or self._clock.new_id("ep")
            begun = Begun(
                calls=tuple(self._clock.new_id("call") for _ in range(asking.choices)), episode=episode, model=model,
                given=given, agent=agent, started_at=self._clock.now(), policy_version=ledger.policy_version(model),
                gate_since=ledger.gate_now.since,
            )
            missed = self._missed.explains(name, retries, ledger.find(episode))
            events = opening(episode=episode, calls=begun.calls, at=begun.started_at, missed=missed)
            self._store.post(events)
            if not any(isinstance(event, CallLost) for event in events):  # it repeats none that is known
                self._missed.let_in(name)
            reason = DISCONNECTED
            self._under_way.add(episode, over)
            try:
                yield begun
            except AjetError:
                reason = ENGINE_ERROR
                raise
            finally:
                self._under_way.remove(episode, over)
                self.lose([Gone(episode, call, reason) for call in begun.calls])

    def missed(self, tenant: str | None) -> None:
        self._missed.anything(self._clock.now(), tenant)

    async def end(self, endings: Sequence[Ending]) -> None:
        *first, last = endings
        try:
            self.lose(first)
            if events := self._decide(last):  # there are none for what came too late, and nothing to wait for
                await self._store.commit(events)
        except BaseException as error:
            self.lose(taken_back(endings, NOT_WRITTEN if isinstance(error, AjetError) else DISCONNECTED))
            raise

    def sent(self, calls: Sequence[str]) -> None:
        self._sent.update(calls)
        self._note_sent_later()

    def unknown(self, calls: Sequence[str]) -> None:
        self._unknown.update(calls)
        self._note_sent_later()

    def close(self) -> None:
        """Note what is known; nobody is answered any more."""
        if self._noting is not None:
            self._noting.cancel()
        self._note_sent()
        self._closed = True

    def _note_sent_later(self) -> None:
        if self._noting is None and not self._closed:
            self._noting = asyncio.get_running_loop().call_later(SENT_S, self._note_sent)

    def _note_sent(self) -> None:
        """Put on record whose clients have been sent the end, when the disk takes it."""
        self._noting = None
        try:
            self._store.post(self._store.ledger.answers_sent(self._sent, self._unknown, at=self._clock.now()))
        except NotReady:
            self._note_sent_later()
        else:
            self._sent, self._unknown = set(), set()

    def lose(self, endings: Sequence[Ending]) -> None:
        for ending in endings:  # one by one, because each changes what the next one means
            self._store.post(self._decide(ending))

    async def recall(self, sought: Sought, episode: str) -> tuple[Known, Packed] | str:
        known = self._memory.recall(sought)
        if isinstance(known, str):
            return known
        before = self._store.ledger.packed(episode, known.call)
        return UNKNOWN_HISTORY if before is None else (known, before)

    def remember(self, ends: Sequence[tuple[bytes, str]], shape: bytes, call: str, ended: str) -> None:
        ledger = self._store.ledger
        if not ledger.has_ended(ledger.episode_of_call(call) or ""):
            self._memory.remember(ends, shape, call, ended)

    def keep(self, response: str, ask: Ask) -> None:
        self._retold.keep(response, ask)

    async def kept(self, response: str) -> Ask | None:
        return self._retold.kept(response)

    async def complete(self, episode: str, model: str, agent: str) -> Sequence[Packed]:
        known = self._store.ledger.episodes.get(episode)
        return () if known is None else known.complete(model, agent)

    def _heard(self, events: Sequence[Event]) -> None:
        """Nothing goes on in an episode that has ended, what runs in one that is discarded ends with it, names know
        what is in memory, and who waits at the gate looks again when it opens or an engine is announced."""
        for event in events:
            if isinstance(event, EpisodeOpened):
                self._names.opened(event.episode, event.identified_by)
            elif isinstance(event, EpisodesArchived):
                for episode in event.episodes:
                    self._names.left(episode)
            elif isinstance(event, EpisodeSealed | EpisodeDiscarded):
                self._memory.forget(self._store.ledger.episodes[event.episode].calls)
            elif isinstance(event, GateOpened | PolicyAnnounced):
                self._gate.changed()
                self._telling.keep(str(URL(url, encoded=True)).rstrip("/") for url in self._engines.all())
            if isinstance(event, EpisodeDiscarded) and not event.models:
                self._under_way.end(event.episode)

    def _current(self, identity: Identity) -> Identity:
        """`identity` with the episode that a borrowed name stands for."""
        if identity.episode is None or identity.identified_by not in RUNGS:
            return identity
        find, tenant = self._store.ledger.find, identity.claims.tenant
        found = self._names.current(identity.episode, tenant, find, for_reward=identity.reward is not None)
        return replace(identity, episode=found)

    def _come_in(self, model: str) -> Inside:
        return self._gate.enter(ready=lambda: bool(self._engines.candidates(model)))

    def _continued(
        self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]
    ) -> tuple[Identity, Mapping[str, Any]]:
        """`identity` with the episode that the request continues if nothing names one; what to note on a new one."""
        if identity.episode is not None:
            return identity, _NOTHING
        found = self._store.ledger.continued(history, **sent)
        what = ("new", "continued", "ambiguous")[min(len(found), 2)]
        self._metrics.inc("ajet_lineage_total", found=what)
        if len(found) == 1:
            return replace(identity, episode=found[0]), _NOTHING
        return identity, {"may_continue": found[:MAX_NOTED]} if found else _NOTHING

    def _tenant(self, identity: Identity, episode: str) -> str:
        """The tenant as whom the caller acts on `episode`; `NotFound` for a key whose episode is gone."""
        owner = self._store.ledger.tenant_of(episode)
        if owner is None and identity.issued:
            raise NotFound(f"no episode {episode!r}, although its key is good", param="episode")
        if owner is not None and identity.claims.scope == "admin":
            return owner
        if owner is not None and owner != identity.claims.tenant:
            raise Forbidden(f"episode {episode!r} is another tenant's", code="wrong_episode")
        return identity.claims.tenant

    def _decide(self, ending: Ending) -> tuple[Event, ...]:
        """The events of one call's end, from which it is seen whether its engine tells what it sampled."""
        ledger, at = self._store.ledger, self._clock.now()
        if isinstance(ending, Whole):
            self._telling.whole(ending.engine)
        elif ledger.wanted(ending.episode, ending.call):
            self._telling.lost(ending.engine, ending.reason)
        try:
            if isinstance(ending, Whole):
                events = ledger.finish_call(ending.episode, ending.call, at=at, marks=ending.marks)
                if not any(isinstance(event, CallFinished) for event in events):  # too late, and used all the same
                    self.used(ledger.tenant_of(ending.episode) or "", ending.call.turn.end)
                return events
            return ledger.lose_call(
                ending.episode, ending.call, ending.reason, at=at, marks=ending.marks, taken_back=ending.taken_back
            )
        except AjetError as error:
            name = ending.call.turn.call if isinstance(ending, Whole) else ending.call
            logger.info("call %s ended without effect: %s", name, error.message)
            return ()
