"""Names that an agent uses for purposes of its own, a session's or a user's, and the episodes that they stand for.

Nobody who sends such a name has agreed to say when an episode is over, so the name outlives the episode: when the one
that it stands for has ended, its next call opens another one, ``NAME.2`` and so on. Two tenants that use one name mean
two things by it, so a tenant's name is part of the id.

Invariant: a call is sent to an open episode or to a new one; a reward to the latest that the name stood for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ajet_proxy.core.episode import Episode
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import check_id

RUNGS = ("harness", "body")
"""The ways of `core.identity` whose names are borrowed."""


def current(name: str, tenant: str, find: Callable[[str], Episode | None], *, for_reward: bool) -> str:
    """The id of the episode that `name` stands for when `tenant` uses it. `find` gives an episode by its id, also one
    that is archived. Ids are given out in order, so the last one that is taken is found by halving."""
    taken = 0
    step = 1
    while find(_id(name, tenant, taken + step)) is not None:
        taken += step
        step *= 2
    while step > 1:
        step //= 2
        if find(_id(name, tenant, taken + step)) is not None:
            taken += step
    latest = find(_id(name, tenant, taken)) if taken else None
    usable = latest is not None and latest.tenant == tenant and (for_reward or latest.state == "open")
    return _id(name, tenant, taken if usable else taken + 1)


def _id(name: str, tenant: str, number: int) -> str:
    """The id of the episode number `number` of a name; an id made from it where it cannot be one."""
    whole = f"{name}@{tenant}" if tenant else name
    whole = f"{whole}.{number}" if number > 1 else whole
    try:
        return check_id(whole)
    except BadRequest:
        return f"name-{hashlib.sha256(whole.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
