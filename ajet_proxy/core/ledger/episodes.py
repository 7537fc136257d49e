"""The episodes in memory, by their ids, and what is found by way of them: calls, histories, names.

Idea: an episode that has ended stays until it is archived (`ajet_proxy.core.ledger.retention`). Then it is no part of
the state any more. It is kept in ``leaving`` until it is known to be in the archive, so that it is always found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ajet_proxy.core.conversation.history import Beginnings, Lineage
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.session_names import NAME_RUNS, RUNGS, first_of
from ajet_proxy.core.trajectory.timeline import Turn
from ajet_sdk.errors import Conflict, NotFound

MOST_SHARED = 10_000
"""Names that were those of several runs, the latest."""
MOST_WITHDRAWN = 10_000
"""Episodes from whose later parts nothing is learned, the latest."""
MOST_SEALED = 1000
"""Sealed episodes of which it is remembered how they would go on, the latest."""


class Archive(Protocol):
    """Where ended episodes are read once they have left memory (see `ajet_proxy.core.ledger.retention`)."""

    def episode(self, name: str) -> Episode | None: ...

    def batch(self, name: str) -> LeasedBatch | None: ...

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterable[Episode]:
        """The heads of `limit` episodes that were archived before the episode `before`, the latest first."""


class Episodes(dict[str, Episode]):
    """The episodes in memory. ``changes`` counts how often one of them came to another state."""

    KEPT = (
        "finished", "unsent", "lineage", "sealed_lineage", "cut_lineage", "shared_names", "withdrawn", "refused",
        "changes", "archived", "judgeable", "awaiting",
    )

    def __init__(self, archive: Archive | None) -> None:
        self.archive = archive
        self.unsettled: dict[str, Episode] = {}  # open, or sealed with calls in flight
        self.open_of: Counter[str] = Counter()
        """The number that each tenant has open."""
        self.awaiting: dict[str, None] = {}
        """Sealed episodes that await a judgement, in the order in which they began to."""
        self.judgeable = 0
        """Changes as often as there may be something to judge that was not before."""
        self.parts: dict[str, list[str]] = {}
        """The later parts of an episode."""
        self.withdrawn: dict[str, None] = {}
        """Chats that were taken back, by their first parts."""
        self.refused: dict[str, None] = {}
        """Others that were withdrawn as they opened: however many, they push out none that was taken back."""
        self.finished: dict[str, int] = {}
        """The episodes that ended, in that order, and the size of their text."""
        self.leaving: dict[str, Episode] = {}
        self.archived: Counter[str] = Counter()
        """The number that was archived in each state."""
        self.by_call: dict[str, str] = {}
        self.by_response: dict[str, set[str]] = {}
        """The complete calls that are parts of an answer, by its id."""
        self.unsent: set[str] = set()
        """Complete calls of which it is not known yet that their client was sent the end."""
        self.lineage, self.sealed_lineage = Lineage(), Lineage()  # of open episodes, and sealed ones that a body names
        self.cut_lineage = Lineage()
        """Of sealed traffic that no path and no header names: by its first part, or by its own if it was named."""
        self.shared_names: dict[str, None] = {}  # by the ids of their first episodes
        self.changes = 0

    def find(self, episode: str) -> Episode | None:
        """`episode`, wherever it is by now; None if there is none."""
        known = self.get(episode) or self.leaving.get(episode)
        if known is None and self.archived and self.archive is not None:
            return self.archive.episode(episode)
        return known

    def of_chat(self, first: str) -> Episode | None:
        """The `first` part of a chat, or a later one if that is not in memory; None if there is none. As long as any
        part is in memory, the archive is not asked."""
        known = self.get(first)
        return self[self.parts[first][-1]] if known is None and first in self.parts else known or self.find(first)

    def known(self, episode: str) -> Episode:
        """`episode`, wherever it is by now, or `NotFound`."""
        known = self.find(episode)
        if known is None:
            raise NotFound(f"no episode {episode}", code="unknown_episode")
        return known

    def continued(
        self, history: Beginnings | None, *, body_hash: str | None = None, idempotency_key: str | None = None,
        retries: int = 0, consents: bool | None = None,
    ) -> tuple[str, ...]:
        """The open episode that an unnamed request continues, if there is one; several if nobody can say which of
        them. If it repeats one of which nothing came, it is one that `consents` as this does."""
        def repeats(name: str) -> bool:
            return self.all_lost(name) and not (self[name].opening.traffic and self[name].withdrawn is consents)

        again = self.lineage.repeated(body_hash if retries else None, idempotency_key, repeats)
        if again is not None:
            return (again,)
        return () if history is None else self.lineage.continued(history)

    def chats(self, history: Beginnings) -> tuple[str, ...]:
        """The first parts of all chats, open or sealed, that `history` may go on from."""
        found = self.lineage.continued(history, self.cut_lineage)
        return tuple(dict.fromkeys(self[one].opening.whole if one in self else first_of(one) for one in found))

    def all_lost(self, episode: str) -> bool:
        """Tell whether no call of `episode`, which is in memory, has come to anything."""
        return all(entry.state == "lost" for entry in self[episode].transcript.calls.values())

    def is_withdrawn(self, first: str) -> bool:
        """Tell whether nothing is learned from the parts of the `first` episode, as far as memory knows."""
        parts = map(self.get, (first, *self.parts.get(first, ())))
        known = first in self.withdrawn or first in self.refused
        return known or any(part is not None and part.withdrawn for part in parts)

    def alerts(self) -> dict[str, str]:
        """The line for an operator about names that are those of several runs."""
        if not self.shared_names:
            return {}
        *_, latest = self.shared_names
        return {"shared names": (
            f"{latest!r} (of {len(self.shared_names)}) was the name of several runs, so the history of each call tells "
            f"its episode: {NAME_RUNS}"
        )}

    def open(self, episode: Episode) -> None:
        """`episode` is new."""
        self[episode.id] = self.unsettled[episode.id] = episode
        self.open_of[episode.opening.tenant] += 1
        self._joins(episode)

    def _joins(self, episode: Episode) -> None:
        if episode.opening.first:
            self.parts.setdefault(episode.opening.first, []).append(episode.id)

    def leave(self, name: str) -> Episode:
        """The episode called `name` is on its way to the archive."""
        episode = self.leaving[name] = self.pop(name)
        self.archived[episode.state] += 1
        del self.finished[name]
        if first := episode.opening.first:
            self.parts[first].remove(name)
            if not self.parts[first]:
                del self.parts[first]
        for call, entry in episode.transcript.calls.items():
            del self.by_call[call]
            self.unsent.discard(call)
            self.forget_answer(entry.turn)
        return episode

    def part_of(self, response: str, call: str | None, reaches: Callable[[Episode], bool]) -> tuple[Episode, str]:
        """The episode and the call that are meant by the id of an answer, and by `call` if that is given. Only episodes
        count that are in memory and that the caller `reaches`."""
        named = sorted(one for one in self.by_response.get(response, ()) if call in (None, one))
        found = [(episode, one) for one in named if reaches(episode := self[self.by_call[one]])]
        if not found:
            message = f"no whole call answered with {response}: it was lost, is another tenant's, or is archived by now"
            raise NotFound(message, code="unknown_response", param="response")
        if len(found) > 1:
            message = f"{len(found)} calls answered with {response}: name one as call, such as {found[0][1]}"
            raise Conflict(message, code="several_calls", param="response")
        return found[0]

    def answered(self, turn: Turn) -> None:
        """The client of the call `turn` has an answer."""
        if turn.response is not None:
            self.by_response.setdefault(turn.response, set()).add(turn.call)

    def forget_answer(self, turn: Turn | None) -> None:
        """The call `turn`, if there is one, is not found by its answer any more."""
        if turn is not None and turn.response is not None:
            self.by_response[turn.response].discard(turn.call)
            if not self.by_response[turn.response]:
                del self.by_response[turn.response]

    def moved(self, episode: Episode, before: str) -> None:
        """`episode` has come from the state `before` to another one."""
        self.changes += 1
        if before == "open":
            self.open_of[episode.opening.tenant] -= 1
            if not self.open_of[episode.opening.tenant]:
                del self.open_of[episode.opening.tenant]
        self.judgeable += episode.opening.judged
        if before == "open" and episode.opening.traffic:
            if episode.opening.identified_by == "lineage":
                self.lineage.hand_over(episode.id, self.cut_lineage, MOST_SEALED, episode.opening.whole)
            elif episode.opening.identified_by in RUNGS:  # whose name may turn out to be that of several chats
                self.lineage.hand_over(episode.id, self.cut_lineage, MOST_SEALED)
        elif episode.state == "sealed" and episode.opening.identified_by == "body":
            self.lineage.hand_over(episode.id, self.sealed_lineage, MOST_SEALED)
        self.lineage.drop(episode.id)
        if episode.state not in ("open", "sealed"):
            self.unsettled.pop(episode.id, None)
            self.awaiting.pop(episode.id, None)
        if episode.ended_at is not None:
            self.finished[episode.id] = episode.transcript.size()

    def wait(self, episode: Episode) -> None:
        """`episode` lacks nothing but a judgement from now on."""
        self.changes += 1
        self.judgeable += 1
        self.unsettled.pop(episode.id, None)
        self.awaiting[episode.id] = None

    def awaited(self) -> Iterator[Episode]:
        """The episodes that await a judgement, the oldest first."""
        return map(self.__getitem__, self.awaiting)

    def derive(self) -> None:
        """Rebuild whatever follows from the episodes."""
        self.by_call = {call: episode.id for episode in self.values() for call in episode.transcript.calls}
        self.unsettled = {
            name: one for name, one in self.items() if one.state in ("open", "sealed") and name not in self.awaiting
        }
        self.parts = {}
        self.open_of = Counter(one.opening.tenant for one in self.values() if one.state == "open")
        for episode in self.values():
            self._joins(episode)
            for turn in episode.transcript.turns():
                self.answered(turn)

    def _withdrawn(self, event: ev.EpisodeWithdrawn) -> None:
        whole, opens = event.episode, False  # where it is archived
        if (episode := self.get(event.episode)) is not None:
            episode.withdraw()
            whole, opens = episode.opening.whole, not episode.transcript.calls
        _remember(self.refused if opens and whole not in self.withdrawn else self.withdrawn, whole, MOST_WITHDRAWN)

    def _feedback(self, event: ev.FeedbackGiven) -> None:
        self[event.episode].hear(event)

    def _name_shared(self, event: ev.NameShared) -> None:
        _remember(self.shared_names, event.name, MOST_SHARED)


def _remember(names: dict[str, None], name: str, most: int) -> None:
    """`name` is the latest of `names`, of which the latest `most` are kept."""
    names.pop(name, None)
    names[name] = None
    if len(names) > most:
        del names[next(iter(names))]
