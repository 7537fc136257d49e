"""Names that an agent uses for its own purposes, such as a session's or a user's, and the episodes they stand for.

Nobody who sends such a name has agreed to say when an episode is over, so the name outlives the episode. When the
episode that it stands for has ended, the next call opens another one, ``NAME.2`` and so on (``NAME~2`` where a path or
a header names users' traffic: no client can call an episode so). Two tenants that use one
name mean two things by it, so a tenant's name is part of the id.

The first episode of a name may be gone from the archive while its latest is open, so `SessionNames` knows the latest of
those in memory. A name whose episodes are all archived goes on after the archived ones, or begins anew.

A name may also be that of several runs: one user's, or the number of an example. Two signs show it. A conversation
begins just as another in the episode did. Or a call goes on from an episode of the name that a reward has sealed. From
then on the name stands for nothing (`State.shared_names`), and the history of each call shows its episode.

A session that another one has begun is a part of it, so its name stands for the same episode as its parent's.

Invariant: a call is sent to an open episode or to a new one; a reward to the latest that the name stood for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

from ajet_proxy.core.conversation.history import Beginnings, Lineage
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.events import EpisodeOpened
from ajet_sdk.bodies import check_id
from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import MAX_LABEL

RUNGS = ("harness", "body")
"""The ways of `core.identity.ladder` whose names are such. A path's and a header's are for users' traffic alone."""
_NUMBERED = re.compile(r"(.+)[.~]([1-9][0-9]*)", re.DOTALL)
_DIGEST = re.compile(r"name-[0-9a-f]{32}")
MOST_DIGITS = 12
NAME_RUNS = (
    "name each run by a path (/e/NAME/v1), by X-AJet-Episode or by an episode's key, or set body_names = \"off\""
)
"""Advice for where a name is not that of one run."""
MOST_PARENTS = 10_000
"""Sessions whose parent is remembered, the latest."""


class SessionNames:
    """For each name with an episode in memory, the number of the latest one there."""

    def __init__(self, episodes: Iterable[Episode], sealed: Lineage | None = None) -> None:
        """`sealed` has where the calls of sealed episodes end that a body named."""
        self._latest: dict[str, int] = {}
        self._parents: dict[tuple[str, str], str] = {}
        self._sealed = sealed or Lineage()
        for episode in episodes:
            if has_parts(episode.opening):
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

    def root(self, session: str, parent: str | None, tenant: str = "") -> str:
        """The session of `tenant` that began the one which began … `session`. Nothing is noted of one whose name is
        longer than any label."""
        if parent is not None and parent != session and max(len(parent), len(session)) <= MAX_LABEL:
            self._parents.pop((tenant, session), None)
            self._parents[tenant, session] = parent
            if len(self._parents) > MOST_PARENTS:
                del self._parents[next(iter(self._parents))]
        seen = {session}
        while (above := self._parents.get((tenant, session))) is not None and above not in seen:
            session = above
            seen.add(above)
        return session

    def goes_on(self, episode: str, history: Beginnings) -> bool:
        """Tell whether `history` goes on from a sealed episode of the same name as `episode`."""
        base = _parts(episode)[0]
        return any(_parts(one)[0] == base for one in self._sealed.continued(history))

    def current(
        self, name: str, tenant: str, find: Callable[[str], Episode | None], *, for_reward: bool
    ) -> str:
        """The id of the episode that `name` stands for when `tenant` uses it. `find` gives an episode by its id, even
        if it is archived. Ids are given out in order, so the last one that is taken is found by halving. One that a
        client has called so is no episode of the name."""
        return self.latest(base_of(name, tenant), tenant, find, for_reward=for_reward)

    def latest(
        self, base: str, tenant: str, find: Callable[[str], Episode | None], *, for_reward: bool, parts: bool = False
    ) -> str:
        """As `current`, for the name whose first episode is called `base`. If a path or a header names it, later ones
        are its `parts`, which are called as no client can call an episode."""

        def id_of(number: int) -> str:
            return f"{base}{'~' if parts else '.'}{number}" if number > 1 else base

        def usable(number: int) -> bool:
            known = find(id_of(number)) if number else None
            if known is None or known.opening.tenant != tenant or (number > 1 and not has_parts(known.opening)):
                return False
            return for_reward or known.state == "open"

        taken, step = self._latest.get(base, 0), 1
        if usable(taken):
            return id_of(taken)
        while find(id_of(taken + step)) is not None:
            taken += step
            step *= 2
        while step > 1:
            step //= 2
            if find(id_of(taken + step)) is not None:
                taken += step
        latest = filter(usable, range(taken, 0, -1) if for_reward else (taken,))
        return id_of(next(latest, taken + 1))


def has_parts(opening: EpisodeOpened) -> bool:
    """Tell whether an episode is one of those that a name stood for one after the other."""
    return opening.identified_by in RUNGS or (bool(opening.first) and opening.identified_by != "lineage")


def base_of(name: str, tenant: str) -> str:
    """The id of a name's first episode; a digest for a name that can be no id, or would look like a later one, another
    tenant's or a digest. So no two names have one, whoever uses them."""
    whole = f"{name}@{tenant}" if tenant else name
    try:
        check_id(whole + "." + "0" * MOST_DIGITS)  # so that all of its later ones are ids too
        if "@" not in name and not _NUMBERED.fullmatch(whole) and not _DIGEST.fullmatch(whole):
            return whole
    except BadRequest:
        pass
    both = f"{len(name)}:{whole}"
    return f"name-{hashlib.sha256(both.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def first_of(episode: str) -> str:
    """The first part of a chat that was named in one of `RUNGS`, or by nothing, and of which `episode` is a part."""
    return _parts(episode)[0]


def _parts(episode: str) -> tuple[str, int]:
    """The base and the number of an id that `SessionNames.latest` made."""
    numbered = _NUMBERED.fullmatch(episode)
    return (episode, 1) if numbered is None else (numbered[1], int(numbered[2]))
