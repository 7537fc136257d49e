"""Joining timelines that are one text: a prompt that says what a call read and sampled, in other tokens.

A strict timeline ends where the engine reads its history as other tokens than were sampled. If it is known that the
next prompt begins with the same text (`Turn.same_text`, found out by `core.trajectory.same_text`), the two become one:
what was sampled stays as history, and the tokens that the engine read in its place are left out and counted.

Invariant: no token is trained that was not sampled, and each that was is trained once, because only tokens of a prompt
are left out. A timeline is continued once, by the earliest call that may, and only behind its last call. What a joined
timeline does not promise is law 2: its later calls read other tokens of the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ajet_proxy.core.tokens import common_prefix, cut, unpack_tokens
from ajet_proxy.core.trajectory.timeline import Timeline

COMPARED = 10_000
"""Of a longer stretch between the first and the last difference all tokens count as replaced."""


def join(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """`timelines` of one episode, in the order of their first calls, with those put behind one another that are one
    text."""
    behind = _links(timelines)
    continued = set(behind.values())
    out = []
    for place, timeline in enumerate(timelines):
        if place in continued:
            continue
        joined, at = timeline, place
        while at in behind:
            before, at = at, behind[at]
            joined = _joined(joined, timelines[before].tokens, timelines[at])
        out.append(joined)
    return tuple(out)


def _links(timelines: Sequence[Timeline]) -> dict[int, int]:
    """Which timeline goes on behind which; both by their places."""
    ends = {timeline.turns[-1].call: place for place, timeline in enumerate(timelines)}
    behind: dict[int, int] = {}
    for place, timeline in enumerate(timelines):
        first = timeline.turns[0]
        call, tokens = first.same_text or ("", 0)
        before = ends.get(call)
        if before is None or before in behind or tokens > first.start or _last(behind, place) == before:
            continue
        if (timelines[before].model, timelines[before].agent) == (timeline.model, timeline.agent):
            behind[before] = place
    return behind


def _last(behind: dict[int, int], place: int) -> int:
    """The last timeline of those that go on from `place`."""
    while place in behind:
        place = behind[place]
    return place


def _joined(joined: Timeline, text: bytes, timeline: Timeline) -> Timeline:
    """`timeline` behind `joined`, whose last call read and sampled `text`."""
    _, tokens = timeline.turns[0].same_text or ("", 0)
    shift = len(joined) - tokens
    return Timeline(
        joined.tokens + cut(timeline.tokens, tokens, len(timeline)),
        (*joined.turns, *(replace(turn, start=turn.start + shift, end=turn.end + shift) for turn in timeline.turns)),
        joined.broken_by,
        joined.repaired_tokens + replaced(cut(timeline.tokens, 0, tokens), text),
    )


def replaced(read: bytes, kept: bytes) -> int:
    """How many of the tokens that were `read` are not among the `kept` ones of the same text, in their order; where
    all are, how many of the `kept` ones were not read: tokens of no text."""
    start = common_prefix(read, kept)
    one, other = unpack_tokens(read)[start:], unpack_tokens(kept)[start:]
    shorter = min(len(one), len(other))
    end = next((at for at, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b), shorter)
    one, other = one[: len(one) - end], other[: len(other) - end]
    same = 0 if max(len(one), len(other)) > COMPARED else _in_common(one, other)
    return len(one) - same or len(other) - same


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common subsequence, a row of the table at a time in the bits of an integer (Crochemore
    et al., A fast and practical bit-vector algorithm for the longest common subsequence problem, 2001)."""
    places: dict[int, int] = {}
    for place, token in enumerate(other):
        places[token] = places.get(token, 0) | 1 << place
    all_places = (1 << len(other)) - 1
    row = all_places
    for token in one:
        met = row & places.get(token, 0)
        row = (row + met | row - met) & all_places
    return len(other) - row.bit_count()
