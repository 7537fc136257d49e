"""The `LedgerPort` of the process that has the ledger.

Its answers are the ledger's, and what it is told becomes events, which `Store` puts on disk.

Next: ajet_proxy/core/ledger/commands.py
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from msgspec.structs import replace

from ajet_proxy.core.continuity.memory import Known, Memory, Outcome, Sought
from ajet_proxy.core.conversation.history import Beginnings
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.attempts import HELD, UNSERVED
from ajet_proxy.core.ledger.commands import CallAsked
from ajet_proxy.core.ledger.engine_alerts import EngineAlerts
from ajet_proxy.core.ledger.episode import Episode, takes, wants
from ajet_proxy.core.ledger.retries import UnseenRequests
from ajet_proxy.core.ledger.session_names import base_of
from ajet_proxy.core.ledger.weights import Serving
from ajet_proxy.core.protocol.dialect import Ask
from ajet_proxy.core.protocol.responses.dialect import KeptResponses
from ajet_proxy.core.trajectory.call import (
    DISCONNECTED,
    ENGINE_ERROR,
    ENGINE_SILENT,
    NOT_WRITTEN,
    OTHER_WEIGHTS,
    TRUNCATED,
)
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_proxy.io.engines.upstream import Engines, as_asked
from ajet_proxy.io.engines.watch import EngineWatch
from ajet_proxy.io.ledger_port.cancellation import DiscardWatch, OnDiscard, ignore
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.ledger_port.naming import UNSURE, Naming, tenant_of, unnamed
from ajet_proxy.io.ledger_port.port import Begun, CallRequest, Ending, Gone, Whole, is_ours, unsent, why_lost
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage.recalled import Unread
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import AjetError, BadRequest, NotFound, NotReady
from ajet_sdk.headers import HEADER_REWARD
from ajet_sdk.untrainable import UNTRAINABLE

logger = logging.getLogger(__name__)

FAILED = (ENGINE_ERROR, ENGINE_SILENT, TRUNCATED)
"""Reasons for which the calls of an engine that died are lost."""
SENT_S = 0.25
"""So often it is put on record at most whose answers have been sent."""


class LocalPort:
    """The `LedgerPort` of the process that has the ledger."""

    def __init__(
        self, *, store: Store, gate: Gatekeeper, engines: Engines, clock: Clock, metrics: Metrics,
        watch: EngineWatch, pauses: bool = False,
    ) -> None:
        """`watch` tells which engines serve what no trainer has given them. `pauses` says that
        engines are frozen with their calls while a gate is shut."""
        self._store, self._watch = store, watch
        self._state, self._commands = store.state, store.commands
        self.serving: Serving = store.state.weights
        self._gate = gate
        self._pauses = pauses
        self._engines = engines
        self._clock = clock
        self._metrics = metrics
        self._memory = Memory()
        self._naming = Naming(store, clock, metrics)
        self._unseen = UnseenRequests(clock.now())
        receipts = Receipts(store, clock)
        self.sent, self.unknown, self.close = receipts.sent, receipts.unknown, receipts.close
        self._discards = DiscardWatch()
        store.listen(self._heard)
        self._kept_responses = kept = KeptResponses()
        self.keep = kept.keep
        self._engine_alerts = EngineAlerts(store.trouble)

    async def find(self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]) -> Identity:
        found = await self._naming.meant(identity, history, sent)
        if found.episode is not None and (known := await self._naming.find(found.episode)) is not None:
            tenant_of(found, found.episode, known)
        return found

    async def withdraw(self, identity: Identity) -> None:
        found = await self.find(identity, None, {})
        known = await self._naming.find(found.episode)
        await self._store.commit(await self._naming.takes_back(found, known, None))

    async def reward(self, identity: Identity, name: str, again: bool | None) -> None:
        assert identity.labels.reward is not None
        episode, body, commands = identity.episode, identity.labels.reward, self._commands
        if episode is None:
            raise BadRequest(
                f"{HEADER_REWARD} needs an episode, and this request neither names one nor continues any one",
                param=HEADER_REWARD,
            )
        known = await self._naming.find(episode)
        tenant = tenant_of(identity, episode, known)
        if known is None:
            if body.call is not None:
                raise NotFound(f"episode {episode} has no call {body.call}", code="unknown_call")
            started = ev.CallStarted(self._clock.now(), episode, (), "", "", identity.identified_by, "")
            opens = partial(commands.open_on_sight, _asked(identity, started, tenant))
            await self._store.commit(await self._store.decide(opens, unknown=(episode,)))
            known = self._state.episodes.known(episode)
        sent, at = (episode, name), self._clock.now()
        if again is not None:
            before = sum(one.startswith(name) for one in known.rewards)
            repeated = again and not self._unseen.explains(sent, None)
            name = f"{name}-{max(0, before - 1) if repeated else before}"
        events = await self._store.decide(lambda: (
            *commands.label(
                self._state.episodes.known(episode), task=identity.labels.task, eval=identity.labels.eval, at=at
            ),
            *commands.reward(episode, body, reward_id=name, at=at),
        ))
        try:
            self._store.check(events)
        except NotReady:
            if not again:
                self._unseen.refused(sent, at)
            raise
        if again:
            self._unseen.let_in(sent)
        await self._store.commit(events)

    async def model_for(self, identity: Identity, asked: str) -> str | None:
        known = await self._naming.find(identity.episode)
        if known is None:
            return None
        agent = known.opening.agent_of(identity.labels.agent, asked)
        return known.opening.model_for(agent, asked, self._engines.names())

    async def admit(self, identity: Identity) -> None:
        episode = identity.claims.episode
        if episode is not None and identity.labels.reward is None:
            known = await self._naming.find(episode)
            tenant_of(identity, episode, known)
            if known is not None:
                takes("call", known)
        if self._store.quotas is not None:
            self._store.quotas.pass_one(identity.claims.tenant, self._clock.now())

    def used(self, tenant: str, tokens: int) -> None:
        if self._store.quotas is not None:
            self._store.quotas.use(tenant, tokens, self._clock.now())

    @asynccontextmanager
    async def enter(self, model: str, episode: str = "", on_discard: OnDiscard = ignore) -> AsyncIterator[None]:
        async with self._come_in(model, episode):
            with self._discards.watched(episode, on_discard):
                yield

    @asynccontextmanager
    async def begin(self, request: CallRequest, on_discard: OnDiscard) -> AsyncIterator[Begun]:
        retries, entered, lost = request.sent["retries"], False, None
        try:
            identity, metadata, known = await self._naming.whose(request)
            spare = self._clock.new_id("ep")
            episode = identity.episode or spare
            unknown = (spare,) if known is not None else (spare, episode)
            said = identity.labels.agent
            agent = said or "" if known is None else known.opening.agent_of(said, request.model)
            chosen = None if known is None else known.opening.model_for(agent, request.model, self._engines.names())
            weights = self._state.weights
            model = chosen or request.model or weights.only_model()
            plays = None if known is None else known.opening.model
            if plays is not None and plays != model == weights.owner(plays):  # who asks for it means its candidate
                chosen = model = plays
            started = ev.CallStarted(
                self._clock.now(), episode, (), model, agent, identity.identified_by, route=request.route,
                said=request.said, **request.sent,
            )
            asked = replace(
                _asked(identity, started, tenant_of(identity, episode, known)), metadata=metadata,
                prompt="" if request.probe else request.prompt,
            )
            if asked.withdraws:  # even if it is never let in
                self._store.post(await self._naming.takes_back(identity, known, request.history))
                unknown = (spare,)
            lost = None if known is None else partial(
                self._commands.lose_request, episode, agent=agent, model=model, said=request.said
            )
            if not (self._gate.is_open(self._engines.home(model)) and self._engines.candidates(model)):
                # waiting takes memory
                now = partial(self._commands.begin_call, asked, known)
                self._store.check(await self._store.decide(now, unknown))
                unknown = (spare,)  # by the time that it is let in, much may have happened
            async with self._come_in(model, episode):
                begin = partial(self._begun, request, asked, chosen, known, (episode, spare))
                begun, events = await self._store.decide(begin, unknown)
                self._store.post(events)
                entered = True
                if retries and not any(isinstance(event, ev.CallLost) for event in events):  # it repeats none known
                    self._unseen.let_in(_noted(request))
                with self._running(begun, on_discard):
                    yield begun
        except BaseException as error:
            if lost is not None and not entered:
                self._not_let_in(lost, error)
            raise
        finally:
            if not (entered or retries):
                self._unseen.refused(_noted(request), self._clock.now())

    def _begun(
        self, request: CallRequest, asked: CallAsked, chosen: str | None, seen: Episode | None, names: tuple[str, str]
    ) -> tuple[Begun, Sequence[ev.Event]]:
        """The calls of a request that is let in now, and what begins them. `seen` is its episode, if there was one. Of
        the `names` of episodes, the second is of a new one, for where the first is somebody else's now, or over."""
        state, named, (episode, spare) = self._state, request.identity, names
        agent, model = asked.started.agent, asked.started.model
        known, shared = state.episodes.find(episode), tuple[ev.Event, ...]()
        if seen is None and self._naming.is_anothers(named, known, request.history):
            own, started = unnamed(named), replace(asked.started, identified_by="lineage")
            asked = replace(asked, started=started, first="", traffic=own.traffic, consents=own.consents)
            shared, known, episode = (self._naming.shared(named),), None, spare
        if named.labels.reward is None and known is not None and known.state != "open":
            if (was := known.opening).traffic:
                asked = replace(asked, first=was.whole, traffic=was.lane or "", consents=True)
            if was.traffic or named.identified_by in UNSURE:
                current = self._naming.current(named)
                asked, episode = replace(asked, first=current.first or asked.first), current.episode or spare
                known = state.episodes.find(episode)
        begun = Begun(
            calls=tuple(self._clock.new_id("call") for _ in range(request.choices)), episode=episode,
            model=model, episode_model=chosen, agent=agent, started_at=self._clock.now(),
            policy_version=state.weights.policy_version(model), gate_since=self._gate_since(model),
            open=() if known is None else known.attempts.open_to(agent),
            identified_by=asked.started.identified_by,
        )
        self._naming.comes(known, request)
        unseen = request.sent["retries"] > 0 and self._unseen.explains(_noted(request), known)
        started = replace(asked.started, at=begun.started_at, episode=episode, calls=begun.calls)
        begins = self._commands.begin_call(replace(asked, started=started, unseen=unseen), known)
        return begun, (*shared, *begins)

    def _not_let_in(self, lost: Callable[..., Sequence[ev.Event]], error: BaseException) -> None:
        """Record a request that became no call, unless that is its own fault: its client gave up at the gate, or got an
        error of ours."""
        if isinstance(error, asyncio.CancelledError):
            self._store.post(lost(HELD, at=self._clock.now()))
        elif not isinstance(error, AjetError) or is_ours(error):
            self._store.post(lost(UNSERVED, at=self._clock.now(), detail=getattr(error, "code", "internal_error")))

    def _gate_since(self, model: str) -> float:
        """When a gate was last moved that holds requests for `model`."""
        home, gates = self._engines.home(model), self._state.gates.table.items()
        own = (gate.since for name, gate in gates if self._engines.guards(name, home))
        return max(own, default=0.0)

    @contextmanager
    def _running(self, begun: Begun, on_discard: OnDiscard) -> Iterator[None]:
        """A block in which the calls of `begun` are in flight. Calls that have not ended when it is left are lost."""
        reason, status = DISCONNECTED, 0
        try:
            with self._discards.watched(begun.episode, on_discard):
                yield
        except BaseException as error:
            reason, status = why_lost(error)
            raise
        finally:
            known = self._state.episodes.get(begun.episode)
            if known is not None and known.transcript.running:
                self.lose([Gone(begun.episode, call, reason, status=status) for call in begun.calls])

    def unserved(self, identity: Identity, model: str, code: str) -> None:
        try:
            episode, agent = self._naming.current(identity).episode, identity.labels.agent
        except Unread:  # then no open episode has the name
            return
        known = None if episode is None else self._state.episodes.get(episode)
        if known is not None and known.opening.tenant == identity.claims.tenant:
            agent = known.opening.agent_of(agent, model) if agent or model else None
            self._store.post(self._commands.lose_request(
                known.id, UNSERVED, at=self._clock.now(), agent=agent, model=model, detail=code
            ))

    def unread(self, tenant: str | None) -> None:
        self._unseen.unread(self._clock.now(), tenant)

    async def end(self, endings: Sequence[Ending]) -> None:
        *first, last = endings
        try:
            for engine in {ending.engine for ending in endings if isinstance(ending, Whole)}:
                await self._watch.settle(engine)
            self.lose(first)
            if events := self._decide(last):  # there are none for what came too late, and nothing to wait for
                await self._store.commit(events)
        except AjetError:
            self.lose(unsent(endings, NOT_WRITTEN))
            raise

    def lose(self, endings: Sequence[Ending]) -> None:
        for ending in endings:  # one by one, because each changes what the next one means
            self._store.post(self._decide(ending))

    async def recall(self, sought: Sought, episode: str) -> tuple[Known, Packed] | Outcome:
        known = self._memory.recall(sought)
        if isinstance(known, str):
            return known
        found = self._state.episodes.get(episode)
        before = None if found is None else found.transcript.packed(known.call)
        return "unknown_history" if before is None else (known, before)

    def remember(self, ends: Sequence[tuple[bytes, Outcome | None]], shape: bytes, call: str, ended: str) -> None:
        known = self._state.episodes.get(self._state.episodes.by_call.get(call, ""))
        if known is None or known.state == "open":
            self._memory.remember(ends, shape, call, ended)

    async def kept(self, response: str) -> Ask | None:
        return self._kept_responses.kept(response)

    async def nearest(self, episode: str, model: str, agent: str, prompt: bytes) -> Sequence[Packed]:
        known = self._state.episodes.get(episode)
        return () if known is None else known.transcript.nearest(model, agent, prompt)

    def _heard(self, events: Sequence[ev.Event]) -> None:
        """Act on events. Nothing goes on in an episode that has ended; what runs in one that is discarded ends with it.
        Requests at the gate look again when it opens or an engine is announced."""
        for event in events:
            self._naming.heard(event)
            if isinstance(event, (ev.EpisodeSealed, ev.EpisodeDiscarded)):
                self._memory.forget(self._state.episodes[event.episode].transcript.calls)
            elif isinstance(event, (ev.GateOpened, ev.PolicyAnnounced)):
                self._gate.changed()
                self._watch.spoken(event.model)
                self._engine_alerts.keep(map(as_asked, self._engines.all()))
            if isinstance(event, ev.EpisodeDiscarded) and not event.models:
                self._discards.discarded(event.episode)

    def _come_in(self, model: str, episode: str) -> AbstractAsyncContextManager[None]:
        """Wait for the gate of the model that will serve a request for `model`, and be inside."""
        home, ready = partial(self._engines.home, model), lambda: bool(self._engines.candidates(model))
        return self._gate.enter(home, ready, episode)

    def _is_frozen(self, episode: Episode, call: str) -> bool:
        """True if no engine could go on with a call."""
        entry = episode.transcript.calls.get(call) if self._pauses else None
        return entry is not None and not self._gate.is_open(self._engines.home(entry.asked.model))

    def _decide(self, ending: Ending) -> ev.Events:
        """The events of one call's end. The ending also shows whether the engine tells what it sampled."""
        at, known = self._clock.now(), self._state.episodes.get(ending.episode)
        if isinstance(ending, Gone) and ending.reason == DISCONNECTED and known and self._is_frozen(known, ending.call):
            ending = replace(ending, reason=ENGINE_SILENT)
        if isinstance(ending, Whole) and self._watch.serves_other(ending.engine):
            ending = Gone(
                ending.episode, ending.call.turn.call, OTHER_WEIGHTS, ending.marks, ending.engine, begins=ending.begins
            )
        if isinstance(ending, Whole):
            if ending.engine not in self._engine_alerts.trusted:
                self._engine_alerts.whole(ending.engine)
        elif ending.reason in FAILED:
            self._watch.doubt()
        elif ending.reason in UNTRAINABLE and known is not None and wants(known, ending.call):
            self._engine_alerts.lost(ending.engine, ending.reason)
        try:
            if isinstance(ending, Whole):
                events = self._commands.finish_call(
                    ending.episode, ending.call, at=at, marks=ending.marks, begins=ending.begins
                )
                if not any(isinstance(event, ev.CallFinished) for event in events):  # too late, but used
                    self.used(self._state.episodes.known(ending.episode).opening.tenant, ending.call.turn.end)
                return events
            return self._commands.lose_call(
                ending.episode, ending.call, ending.reason, at=at, marks=ending.marks, taken_back=ending.taken_back,
                begins=ending.begins, status=ending.status,
            )
        except Unread:  # all is over with an archived episode
            return ()
        except AjetError as error:
            name = ending.call.turn.call if isinstance(ending, Whole) else ending.call
            logger.info("call %s ended without effect: %s", name, error.message)
            return ()


def _noted(request: CallRequest) -> tuple[str, str]:
    """By what a request is noted that became no call. A name may be of any length, so its digest stands for it."""
    named = request.identity
    return base_of(named.episode or "", named.claims.tenant), request.sent["body_hash"]


def _asked(identity: Identity, started: ev.CallStarted, tenant: str) -> CallAsked:
    """A request of `tenant`, with what it says of its episode."""
    labels = identity.labels
    return CallAsked(
        started, tenant, labels.task, labels.eval, labels.client, traffic=identity.traffic, first=identity.first,
        judged=bool(identity.claims.lanes), consents=identity.consents, withdraws=labels.traffic is False,
        issued=identity.claims.issued,
    )


class Receipts:
    """Calls whose clients were sent the end of their answers. `store` has them on record, a few times a second."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._sent: set[str] = set()
        self._unknown: set[str] = set()
        self._noting: asyncio.TimerHandle | None = None
        self._closed = False

    def sent(self, calls: Sequence[str]) -> None:
        """The clients of `calls` have been sent the end."""
        self._sent.update(calls)
        self._note_later()

    def unknown(self, calls: Sequence[str]) -> None:
        """Nobody will know whether the clients of `calls` were sent it."""
        self._unknown.update(calls)
        self._note_later()

    def close(self) -> None:
        """Record what there is. Later ones are not recorded, since nobody is answered from now on."""
        if self._noting is not None:
            self._noting.cancel()
        self._note()
        self._closed = True

    def _note_later(self) -> None:
        if self._noting is None and not self._closed:
            self._noting = asyncio.get_running_loop().call_later(SENT_S, self._note)

    def _note(self) -> None:
        """Record them; if the disk refuses, try again later."""
        self._noting = None
        try:
            commands = self._store.commands
            self._store.post(commands.answers_sent(self._sent, self._unknown, at=self._clock.now()))
        except NotReady:
            self._note_later()
        else:
            self._sent, self._unknown = set(), set()
