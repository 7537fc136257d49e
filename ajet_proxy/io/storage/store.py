"""The one place where the running daemon's state changes: apply an event, journal it, tell those who wait.

Idea: everything happens in one event loop. `commit` and `post` apply events at once, in the order in which they were
called, and hand them to the journal's thread. `commit` returns when they, and everything before them, are on disk.

A write costs the same for one record as for many. So what nobody waits for is written along with what somebody waits
for, or after `LINGER_S`. Under load those who wait share a write every `WINDOW_S`.

Invariant: what anybody is told to have happened is on disk. While the journal cannot write, no new work is taken in
(503). The end of work that was taken in before still counts, and waits for the disk. Nobody waits for longer than
``patience_s``.

Next: ajet_proxy/io/storage/journal.py
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.commands import Commands
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.quotas import Quotas
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.archive import ArchiveFile, refuse_missing
from ajet_proxy.io.storage.codec import encode
from ajet_proxy.io.storage.compaction import alone
from ajet_proxy.io.storage.data_dir import begin, lock
from ajet_proxy.io.storage.journal import END_OF_SEGMENT, Journal, JournalDamaged, JournalGone, readable
from ajet_proxy.io.storage.limits import DaemonLimits
from ajet_proxy.io.storage.recalled import Recalled
from ajet_sdk.errors import NotReady

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0
PATIENCE_S = 60.0
LINGER_S = 0.02
"""Seconds for which an event that nobody waits for may stay off the disk."""
WINDOW_S = 0.003
"""The least time between two writes."""
SUBSCRIBER_EVENTS = 10_000
"""A subscriber this far behind is let go."""
ENDS = (
    ev.CallFinished, ev.CallLost, ev.TaskNamed, ev.EpisodeDiscarded, ev.BatchReturned, ev.ProxyStarted, ev.ClientGone,
    ev.RequestLost,
)
"""Events that end work that was taken in before. Everything else is intake."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    number: int
    future: asyncio.Future[None]
    patient: bool
    """It waits for the disk to recover instead of being told 503 at once."""
    until: float
    """When its patience ends, by the loop's clock. Who came first gives up first."""


class Store:
    """State and journal as one; `commands` decide over the state. Make it with `open`, in the event loop that will use
    it."""

    def __init__(
        self, state: State, archive: ArchiveFile, recalled: Recalled, held: int, metrics: Metrics, patience_s: float
    ) -> None:
        self.state, self.presence = state, Presence()
        self.commands = Commands(state, self.presence)
        self.patience_s = patience_s
        self.limits: DaemonLimits | None = None
        self.quotas: Quotas | None = None
        self.trouble: dict[str, str] = {}
        """Alerts of who looks after the store, by what they are about."""
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._journal: Journal
        self._archive, self._lock = archive, held
        self.decide = recalled.decide
        """Asks a command, which may ask the archive."""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushed_at = 0.0
        self._waiters: deque[_Waiter] = deque()
        self._patience_timer: asyncio.TimerHandle | None = None
        """One for all who wait: almost nobody waits for so long, and a timer for each would cost more than its wait."""
        self._sleepers: dict[asyncio.Future[None], object] = {}
        self._subscribers: set[asyncio.Queue[Event | None]] = set()
        self._listeners: list[Callable[[Sequence[Event]], None]] = []

    @classmethod
    def open(
        cls, data_dir: Path, settings: LedgerSettings, *, metrics: Metrics | None = None,
        patience_s: float = PATIENCE_S, journal: Callable[[Path, Callable[[], None]], Journal] = Journal,
    ) -> Store:
        """Take hold of `data_dir` and rebuild the state from its journal.

        Raises `Conflict` if another proxy has the directory, `JournalDamaged` if its journal cannot be read or is gone.
        """
        held = lock(data_dir)
        try:
            archive = ArchiveFile(data_dir)
            begin(data_dir)
            with alone(data_dir):
                recalled = Recalled(archive)
                state = snapshot.load(data_dir, settings, recalled)
                refuse_missing(data_dir, state)
                store = cls(state, archive, recalled, held, metrics or Metrics(), patience_s)
                store._journal = journal(data_dir, store._on_progress)
                snapshot.replay(data_dir, store._journal.open(), store.state)
        except BaseException:
            os.close(held)
            raise
        return store

    @property
    def healthy(self) -> bool:
        """Tell whether the journal can write."""
        return self._journal.error is None

    async def commit(self, events: Sequence[Event]) -> None:
        """Apply `events` and return when they and all before them are on disk, or `NotReady` if the disk refuses. Ends
        of calls are not refused at once: the disk has ``patience_s`` to take them.

        After `NotReady` the events may have been applied and reach the disk later. Asking again is safe, because every
        command that is repeated is answered as done.
        """
        began = time.perf_counter()
        self.post(events)
        patient = bool(events) and all(isinstance(event, ENDS[:3]) for event in events)
        if not (self.healthy or patient):
            raise self._not_ready()
        if self._journal.durable < self._journal.appended:
            until = self._loop.time() + self.patience_s
            waiter = _Waiter(self._journal.appended, self._loop.create_future(), patient, until)
            self._waiters.append(waiter)
            if self._patience_timer is None:
                self._patience_timer = self._loop.call_at(until, self._give_up)
            self._flush_in(0.0)
            await waiter.future
        self._metrics.observe("ajet_commit_seconds", time.perf_counter() - began)

    def post(self, events: Sequence[Event]) -> None:
        """Apply `events` and let the journal write them when it can. `NotReady` if they are intake and it cannot write
        now; `TooLarge` at the first one that it can never write."""
        if not events:
            return
        self.check(events)
        records: list[bytes] = []
        try:
            for event in events:
                record = readable(encode(event, self.state.episodes))
                self.state.apply(event)
                records.append(record)
        finally:  # what was applied is written, whatever comes of the rest
            happened = events[: len(records)]
            if self.quotas is not None:
                self.quotas.spend(happened)
            self._journal.append(records, flush=False)
            self._flush_in(LINGER_S)
            self._tell(happened)

    def check(self, events: Sequence[Event]) -> None:
        """Raise what `post` would raise for `events` now; nothing changes."""
        if not self.healthy and not all(isinstance(event, ENDS) for event in events):
            raise self._not_ready()
        if self.limits is not None and self.limits.closed:
            self.limits.check(events)
        if self.quotas is not None:
            self.quotas.check(events)

    async def end_segment(self) -> None:
        """Return when all that has happened is in segments that are no longer written, or `NotReady` if the disk
        refuses."""
        self._journal.append([END_OF_SEGMENT], flush=False)
        await self.commit(())

    async def forget_archived(self, most: int) -> bool:
        """Let go of at most `most` episodes and batches that are in the archive. Returns True if there may be more."""
        leaving = [list(islice(room.leaving, most)) for room in (self.state.episodes, self.state.batches)]
        episodes = await asyncio.to_thread(self._archive.holds, "episodes", leaving[0])
        batches = await asyncio.to_thread(self._archive.holds, "batches", leaving[1])
        self.state.arrived(episodes, batches)
        return most in (len(episodes), len(batches))

    def alerts(self) -> dict[str, str]:
        """List what an operator should look at, by what it is about."""
        error = self._journal.error
        own = {} if error is None else {"journal": f"the journal cannot write, and nothing new is taken in: {error}"}
        return own | self.state.alerts() | self.trouble

    async def leasable(self, seen: object, timeout: float) -> None:
        """Return as soon as `State.leasable` is no longer what was `seen`, or after `timeout` seconds."""
        if self.state.leasable() != seen:
            return
        sleeper = self._loop.create_future()
        self._sleepers[sleeper] = seen
        try:
            await asyncio.wait([sleeper], timeout=timeout)
        finally:
            del self._sleepers[sleeper]

    def listen(self, listener: Callable[[Sequence[Event]], None]) -> None:
        """Tell `listener` of events as they happen, before anybody can have been answered about them."""
        self._listeners.append(listener)

    async def subscribe(self) -> AsyncIterator[Event]:
        """Every event from now on. It ends when the store closes, or when its reader is too far behind."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._subscribers.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._subscribers.discard(queue)

    async def close(self) -> None:
        """Write what is pending, end every wait and let the directory go. `JournalDamaged` if a start would not find
        what was written."""
        for timer in (self._flush_timer, self._patience_timer):
            if timer is not None:
                timer.cancel()
        unwritten = await asyncio.to_thread(self._journal.close)
        if unwritten:
            logger.error("closing with %d records that the disk did not take", unwritten)
        self._progress()
        while self._waiters:
            _resolve(self._waiters.popleft().future, self._not_ready())
        for queue in self._subscribers:
            queue.put_nowait(None)
        self._archive.close()
        os.close(self._lock)
        if isinstance(self._journal.error, JournalGone):
            raise JournalDamaged(str(self._journal.error), code="journal_gone")

    def _flush_in(self, seconds: float) -> None:
        """Have what is queued written in so many seconds, or before."""
        now = self._loop.time()
        when = max(now + seconds, self._flushed_at + WINDOW_S)
        if self._flush_timer is not None:
            if self._flush_timer.when() <= when:
                return
            self._flush_timer.cancel()
            self._flush_timer = None
        if when > now:
            self._flush_timer = self._loop.call_at(when, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        self._flush_timer = None
        self._flushed_at = self._loop.time()
        self._journal.flush()

    def _tell(self, events: Sequence[Event]) -> None:
        for listener in self._listeners:
            listener(events)
        now = self.state.leasable() if self._sleepers else None
        for sleeper, seen in self._sleepers.items():
            if seen != now:
                _resolve(sleeper)
        for queue in list(self._subscribers):
            if queue.qsize() > SUBSCRIBER_EVENTS:
                self._subscribers.discard(queue)
                queue.put_nowait(None)
                continue
            for event in events:
                queue.put_nowait(event)

    def _on_progress(self) -> None:
        """Called from the journal's thread."""
        try:
            self._loop.call_soon_threadsafe(self._progress)
        except RuntimeError:
            logger.debug("the loop ended before the journal")

    def _progress(self) -> None:
        while self._waiters and self._waiters[0].number <= self._journal.durable:
            _resolve(self._waiters.popleft().future)
        if not self.healthy:
            waiting, self._waiters = self._waiters, deque()
            for waiter in waiting:
                if waiter.patient:
                    self._waiters.append(waiter)
                else:
                    _resolve(waiter.future, self._not_ready())

    def _give_up(self) -> None:
        """Tell those who have waited for too long, and come back for the next one."""
        while self._waiters and self._waiters[0].until <= self._loop.time():
            late = self._not_ready(f"it did not take this within {self.patience_s:g} seconds")
            _resolve(self._waiters.popleft().future, late)
        first = self._waiters[0].until if self._waiters else None
        self._patience_timer = None if first is None else self._loop.call_at(first, self._give_up)

    def _not_ready(self, why: str = "it is closed") -> NotReady:
        error = self._journal.error
        if error is not None:
            why = "its file is gone" if isinstance(error, JournalGone) else str(error)
        return NotReady(f"the journal cannot write: {why}", code="journal", retry_after=RETRY_AFTER_S)


def _resolve(future: asyncio.Future[None], error: Exception | None = None) -> None:
    """Resolve `future`, unless its waiter has gone."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
