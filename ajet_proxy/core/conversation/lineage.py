"""Which open episode a request continues when nothing names one.

Every call leaves the marks (`ajet_proxy.core.conversation.history`) at which its client's history ends. A request
continues the episode that has the longest mark among the beginnings of its own history. Of several episodes with that
mark, it is the one in which the ids of tool calls are the same too; if that leaves none or several, nobody can say
whose run it is, and it is taken for a new one: then no two runs are ever mixed, at the price of an episode that lacks
its first turns. A history that no call has ended in begins a new episode too; so do first prompts, however many are
equal.

A request with the ``Idempotency-Key`` of an earlier one continues that one's episode. One that only counts its attempts
may be anybody's with that prompt; it takes the place of a first prompt of which nothing came.

Marks are part of the journal's events and live as long as their episode is open, so a restart forgets none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ajet_proxy.core.conversation.history import Beginnings, Mark


class Lineage:
    """The marks of all open episodes."""

    def __init__(self) -> None:
        self._episodes: dict[str, dict[str, set[str]]] = {}
        """For each mark's key, the episodes that have it, each with its ``firm`` digests."""
        self._marks: dict[str, list[Mark]] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, episode: str, marks: Iterable[Mark]) -> None:
        """Calls of `episode` end in `marks`."""
        for mark in marks:
            self._episodes.setdefault(mark.key, {}).setdefault(episode, set()).add(mark.firm)
            self._marks.setdefault(episode, []).append(mark)
            self._lengths[mark.length] += 1

    def drop(self, episode: str) -> None:
        """`episode` takes no more calls."""
        for mark in self._marks.pop(episode, ()):
            episodes = self._episodes.get(mark.key, {})
            episodes.pop(episode, None)
            if not episodes:
                self._episodes.pop(mark.key, None)
            self._lengths[mark.length] -= 1
            if not self._lengths[mark.length]:
                del self._lengths[mark.length]

    def continued(self, history: Beginnings) -> tuple[str, ...]:
        """The episode that `history` continues; none if it continues none, several if it may continue any of them."""
        for mark in history.beginnings(self._lengths):
            found = self._episodes.get(mark.key)
            if found is None:
                continue
            alike = [episode for episode, firm in found.items() if mark.firm in firm]
            return tuple(alike if len(alike) == 1 else found)
        return ()

    def attempt(self, episode: str, body_hash: str, idempotency_key: str | None) -> None:
        """A request that nothing names is made in `episode`."""
        self.add(episode, [Mark(_again(sent)) for sent in (body_hash, idempotency_key) if sent is not None])

    def repeated(
        self, body_hash: str | None, idempotency_key: str | None, all_lost: Callable[[str], bool]
    ) -> str | None:
        """The episode of an earlier attempt at a request: by its idempotency key, or, if it has none, by its body, if
        that is given, where `all_lost` says that no call of the episode came to anything."""
        if idempotency_key is not None:
            found = list(self._episodes.get(_again(idempotency_key), ()))
        else:
            found = [name for name in self._episodes.get(_again(body_hash or ""), ()) if all_lost(name)]
        return found[-1] if found else None


def _again(sent: str) -> str:
    return f"again:{sent}"
