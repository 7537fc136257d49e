"""Rules for what leaves memory and the archive, when the journal is compacted, and when the proxy takes no more work.

Idea: an ended episode is kept in memory while it is among the latest ones, because people look at those and clients
repeat themselves. It stays no longer than retention allows. Then `EpisodesArchived` takes it and its batches out of the
state, live and in every replay at the same place. So the state has the size of the work in hand, not of all that was
ever trained. The same holds for its snapshot and the time to start.

Nothing is cleared to make room. When the disk or the memory that the operator allows is nearly used up, no new episode
is taken in; when it is used up, no new call. What is under way can be rewarded, leased and acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.state import State

KEPT_EPISODES, KEPT_BYTES = 1000, 64 << 20
"""So many of the latest ended episodes stay in memory, if their text is not more than this."""
AT_ONCE = 200
"""One event archives no more episodes, or a tenth of those that wait: no tick takes long, and they do not pile up,
however many end."""
NEARLY = 0.9


def to_archive(state: State, at: float, max_age: float = 0.0) -> ev.Events:
    """The episodes whose time in memory is over, and the batches that have no episode left in memory. No episode goes
    with which others may still be compared. One that ended more than `max_age` seconds ago is not kept, however few
    there are; 0 means no limit."""
    surplus, held = len(state.episodes.finished) - KEPT_EPISODES, sum(state.episodes.finished.values())
    most, chosen = max(AT_ONCE, surplus // 10), list[str]()
    ended_after, needed = at - max_age if max_age else 0.0, state.seats.queues.needed()
    for name, size in state.episodes.finished.items():
        episode = state.episodes[name]
        latest = surplus <= 0 and held <= KEPT_BYTES and (episode.ended_at or 0.0) >= ended_after
        if latest or len(chosen) == most:
            break
        surplus, held = surplus - 1, held - size
        if not episode.transcript.running and name not in needed:
            chosen.append(name)
    if not chosen:
        return ()
    staying = state.episodes.keys() - set(chosen)
    batches = [
        batch.id for batch in state.batches.values()
        if batch.state != "leased" and staying.isdisjoint(batch.episodes())
    ]
    return (ev.EpisodesArchived(state.time(at), tuple(chosen), tuple(batches)),)


def is_due(sealed: int, snapshot: int) -> bool:
    """Tell whether to compact a journal with `sealed` bytes in ended segments after a snapshot of `snapshot` bytes.
    Then all snapshots together cost no more writing than the journal, and a start reads at most twice the state."""
    return sealed > 0 and sealed >= snapshot


def to_remove(oldest_first: Iterable[tuple[float, int]], total: int, limit: int) -> Iterator[float]:
    """When the archived episodes ended that are removed until at most `limit` of `total` bytes are left. `oldest_first`
    gives when each episode ended, and its bytes."""
    for ended, size in oldest_first:
        if total <= limit:
            return
        total -= size
        yield ended


def closed_to(used: int, limit: int) -> tuple[type[ev.Event], ...]:
    """The events that are not taken in while `used` of `limit` bytes are used; a limit of 0 means none."""
    if not limit or used < NEARLY * limit:
        return ()
    return (ev.EpisodeOpened,) if used < limit else (ev.EpisodeOpened, ev.CallStarted)
