"""The episodes in memory, by their ids, and what is found by way of them: calls, histories, names.

Idea: an episode that has ended stays until it is archived (`ajet_proxy.core.ledger.retention`). Then it is no part of
the state any more. It is kept in ``leaving`` until it is known to be in the archive, so that it is always found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from ajet_proxy.core.conversation.history import Beginnings, Lineage
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.session_names import NAME_RUNS
from ajet_sdk.errors import NotFound

MOST_SHARED = 10_000
"""Names that were those of several runs, the latest."""
MOST_SEALED = 1000
"""Sealed episodes of which it is remembered how they would go on, the latest."""


class Archive(Protocol):
    """Where ended episodes are read once they have left memory (see `ajet_proxy.core.ledger.retention`)."""

    def episode(self, name: str) -> Episode | None: ...

    def batch(self, name: str) -> LeasedBatch | None: ...

    def latest(self, state: str | None, task: str | None, before: str | None, limit: int) -> Iterable[Episode]:
        """The heads of `limit` episodes that were archived before the episode `before`, the latest first."""


class Episodes(dict[str, Episode]):
    """Those in memory. ``changes`` counts how often one of them came to another state."""

    KEPT = ("finished", "unsent", "lineage", "sealed_lineage", "shared_names", "changes", "archived")

    def __init__(self, archive: Archive | None) -> None:
        self.archive = archive
        self.unsettled: dict[str, Episode] = {}  # open or sealed
        self.finished: dict[str, int] = {}
        """Those that ended, in that order, and the size of their text."""
        self.leaving: dict[str, Episode] = {}
        self.archived: Counter[str] = Counter()
        """How many were archived in each state."""
        self.by_call: dict[str, str] = {}
        self.unsent: set[str] = set()
        """Complete calls of which it is not known yet that their client was sent the end."""
        self.lineage, self.sealed_lineage = Lineage(), Lineage()  # of open episodes, and sealed ones that a body names
        self.shared_names: dict[str, None] = {}  # by the ids of their first episodes
        self.changes = 0

    def find(self, episode: str) -> Episode | None:
        """`episode`, wherever it is by now; None if there is none."""
        known = self.get(episode) or self.leaving.get(episode)
        if known is None and self.archived and self.archive is not None:
            return self.archive.episode(episode)
        return known

    def known(self, episode: str) -> Episode:
        """`episode`, wherever it is by now, or `NotFound`."""
        known = self.find(episode)
        if known is None:
            raise NotFound(f"no episode {episode}", code="unknown_episode")
        return known

    def continued(
        self, history: Beginnings | None, *, body_hash: str, idempotency_key: str | None, retries: int
    ) -> tuple[str, ...]:
        """The open episode that an unnamed request continues, if there is one; several if nobody can say which of
        them."""
        again = self.lineage.repeated(body_hash if retries else None, idempotency_key, self.all_lost)
        if again is not None:
            return (again,)
        return () if history is None else self.lineage.continued(history)

    def all_lost(self, episode: str) -> bool:
        """Tell whether no call of `episode`, which is in memory, has come to anything."""
        return all(entry.state == "lost" for entry in self[episode].transcript.calls.values())

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

    def leave(self, name: str) -> Episode:
        """The episode called `name` is on its way to the archive."""
        episode = self.leaving[name] = self.pop(name)
        self.archived[episode.state] += 1
        del self.finished[name]
        for call in episode.transcript.calls:
            del self.by_call[call]
            self.unsent.discard(call)
        return episode

    def moved(self, episode: Episode) -> None:
        """`episode` has come to another state."""
        self.changes += 1
        if episode.state == "sealed" and episode.opening.identified_by == "body":
            self.lineage.hand_over(episode.id, self.sealed_lineage, MOST_SEALED)
        self.lineage.drop(episode.id)
        if episode.state not in ("open", "sealed"):
            self.unsettled.pop(episode.id, None)
        if episode.ended_at is not None:
            self.finished[episode.id] = episode.transcript.size()

    def derive(self) -> None:
        """Rebuild whatever follows from the episodes."""
        self.by_call = {call: episode.id for episode in self.values() for call in episode.transcript.calls}
        self.unsettled = {name: episode for name, episode in self.items() if episode.state in ("open", "sealed")}

    def _name_shared(self, event: ev.NameShared) -> None:
        self.shared_names.pop(event.name, None)
        self.shared_names[event.name] = None
        if len(self.shared_names) > MOST_SHARED:
            del self.shared_names[next(iter(self.shared_names))]
