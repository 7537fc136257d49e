"""Names that an agent uses for its own purposes, such as a session's or a user's, and the episodes they stand for.

Nobody who sends such a name has agreed to say when an episode is over, so the name outlives the episode. When the
episode that it stands for has ended, the next call opens another one, ``NAME.2`` and so on. Two tenants that use one
name mean two things by it, so a tenant's name is part of the id.

The first episode of a name may be gone from the archive while its latest is open, so `SessionNames` knows the latest of
those in memory. A name whose episodes are all archived goes on after the archived ones, or begins anew.

Invariant: a call is sent to an open episode or to a new one; a reward to the latest that the name stood for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

from ajet_proxy.core.ledger.episode import Episode
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import check_id

RUNGS = ("harness", "body")
"""The ways of `core.identity.ladder` whose names are such."""
_NUMBERED = re.compile(r"(.+)\.([1-9][0-9]*)", re.DOTALL)
MOST_DIGITS = 12


class SessionNames:
    """For each name with an episode in memory, the number of the latest one there."""

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._latest: dict[str, int] = {}
        for episode in episodes:
            if episode.identified_by in RUNGS:
                self.opened(episode.id)

    def opened(self, episode: str) -> None:
        """`episode`, which was named in one of `RUNGS`, is new."""
        base, number = _parts(episode)
        self._latest[base] = number

    def left(self, episode: str) -> None:
        """`episode` has left memory."""
        base, number = _parts(episode)
        if self._latest.get(base) == number:
            del self._latest[base]

    def current(
        self, name: str, tenant: str, find: Callable[[str], Episode | None], *, for_reward: bool
    ) -> str:
        """The id of the episode that `name` stands for when `tenant` uses it. `find` gives an episode by its id, even
        if it is archived. Ids are given out in order, so the last one that is taken is found by halving."""

        def usable(number: int) -> bool:
            known = find(_id(base, number)) if number else None
            return known is not None and known.tenant == tenant and (for_reward or known.state == "open")

        base = _base(name, tenant)
        taken, step = self._latest.get(base, 0), 1
        if usable(taken):
            return _id(base, taken)
        while find(_id(base, taken + step)) is not None:
            taken += step
            step *= 2
        while step > 1:
            step //= 2
            if find(_id(base, taken + step)) is not None:
                taken += step
        return _id(base, taken if usable(taken) else taken + 1)


def _base(name: str, tenant: str) -> str:
    """The id of a name's first episode; a digest for a name that can be no id or would look like a later one."""
    whole = f"{name}@{tenant}" if tenant else name
    try:
        check_id(whole + "." + "0" * MOST_DIGITS)  # so that all of its later ones are ids too
        if not _NUMBERED.fullmatch(whole):
            return whole
    except BadRequest:
        pass
    return f"name-{hashlib.sha256(whole.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _id(base: str, number: int) -> str:
    return f"{base}.{number}" if number > 1 else base


def _parts(episode: str) -> tuple[str, int]:
    """The base and the number of an id that `_id` made."""
    numbered = _NUMBERED.fullmatch(episode)
    return (episode, 1) if numbered is None else (numbered[1], int(numbered[2]))
