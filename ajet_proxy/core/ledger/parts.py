"""Commands that discard much, in parts: everybody else waits while events are applied.

Idea: such a command returns the first of its events as a `Part`, without the one that all were for. The caller applies
them, lets others have their turn, and gives the command again. It finds less to discard, until nothing is left but its
end. So it may be cut off anywhere, and nobody is told that it was done before it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ajet_proxy.core.ledger.events import Event

AT_ONCE = 50
"""So many episodes are discarded in one part: some 3 ms."""


class Part(tuple[Event, ...]):
    """The first events of a command. The caller applies them and gives the command again."""

    __slots__ = ()


def parted(first: Iterable[Event], *then: Event) -> tuple[Event, ...]:
    """The events `first` and `then`; or a `Part` of `first` if that has more than `AT_ONCE`."""
    found = tuple(islice(first, AT_ONCE + 1))
    return Part(found[:AT_ONCE]) if len(found) > AT_ONCE else (*found, *then)
