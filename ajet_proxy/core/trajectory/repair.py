"""Joining timelines that are one text: a prompt that says what a call read and sampled, in other tokens.

A strict timeline ends where the engine reads its history as other tokens than were sampled. If it is known that the
next prompt begins with the same text (`Turn.same_text`), the two become one. What was sampled stays as history. The
tokens that the engine read in its place are left out and counted.

The core has no tokenizer: `find_same_text` asks for the text of token ids as it needs it, and its caller answers (see
`ajet_proxy.io.engines.rendering`). What is compared is the text from shortly before the first token that differs. A
decoder may write a token in another way at the beginning of a text than within it.

Invariants: no token is trained that was not sampled, and each that was is trained once, because only tokens of a prompt
are left out. A timeline is continued once, by the earliest call that may, and only after its last call. A joined
timeline does not promise law 2: its later calls read other tokens of the same text. What is found is exact: the tokens
that are told, at the start of the prompt, decode to the very text of what the call read and sampled. Text that ends in
the middle of a character is never the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence

from msgspec.structs import replace

from ajet_proxy.core.tokens import common_prefix, count, cut, pack_tokens, unpack_tokens
from ajet_proxy.core.trajectory.timeline import Packed, Timeline, pack
from ajet_sdk.sample import Call

COMPARED = 10_000
"""Of a longer stretch between the first and the last difference all tokens count as replaced."""
TRIED = 8
"""Calls whose text is asked for: those that share the most tokens with the prompt, of equal ones the latest first."""
CONTEXT = 8
"""Tokens before the first difference that are decoded with what is compared."""
SLACK = 4
"""Tokens that may share the last character of a text."""

Found = tuple[str, int]
Text = Callable[[str, Sequence[int]], str]
"""The text of token ids under a model's name."""
Decoding = Generator[tuple[int, ...], str, Found | None]


def join(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """`timelines` of one episode, in the order of their first calls; those that are one text are put after one
    another."""
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
    """For each timeline that another one continues, which one that is; both by their places."""
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
    """The last of the timelines that continue the one at `place`."""
    while place in behind:
        place = behind[place]
    return place


def _joined(joined: Timeline, text: bytes, timeline: Timeline) -> Timeline:
    """`timeline` put after `joined`, whose last call read and sampled `text`."""
    _, tokens = timeline.turns[0].same_text or ("", 0)
    shift = len(joined) - tokens
    return Timeline(
        joined.tokens + cut(timeline.tokens, tokens, len(timeline)),
        (*joined.turns, *(replace(turn, start=turn.start + shift, end=turn.end + shift) for turn in timeline.turns)),
        joined.broken_by,
        joined.repaired_tokens + replaced(cut(timeline.tokens, 0, tokens), text),
    )


def replaced(read: bytes, kept: bytes) -> int:
    """The number of of the tokens that were `read` are not among the `kept` ones of the same text, in their order. If
    all are, how many of the `kept` ones were not read: tokens of no text."""
    start = common_prefix(read, kept)
    one, other = unpack_tokens(read)[start:], unpack_tokens(kept)[start:]
    shorter = min(len(one), len(other))
    end = next((at for at, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b), shorter)
    one, other = one[: len(one) - end], other[: len(other) - end]
    same = 0 if max(len(one), len(other)) > COMPARED else _in_common(one, other)
    return len(one) - same or len(other) - same


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common subsequence. Each row of the table is the bits of an integer. Source: Crochemore
    et al., A fast and practical bit-vector algorithm for the longest common subsequence problem, 2001."""
    places: dict[int, int] = {}
    for place, token in enumerate(other):
        places[token] = places.get(token, 0) | 1 << place
    all_places = (1 << len(other)) - 1
    row = all_places
    for token in one:
        met = row & places.get(token, 0)
        row = (row + met | row - met) & all_places
    return len(other) - row.bit_count()


def find_same_text(prompt: bytes, calls: Iterable[Packed]) -> Decoding:
    """Finds the call of `calls` (of one model and agent) whose prompt and sampled tokens are, as text, the beginning of
    `prompt`. Returns its id and how many of the prompt's tokens say that text. None if there is none, or if the prompt
    begins with these very tokens. Yields token ids, and is sent their text."""
    shares = [(common_prefix(prompt, call.text), call.turn.rank, call) for call in calls]
    near = sorted(shares, key=lambda share: share[:2], reverse=True)
    for shared, _, call in near[:TRIED]:
        if shared == count(call.text):
            return None
        start = max(0, shared - CONTEXT)
        text = yield unpack_tokens(cut(call.text, start, count(call.text)))
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        if not (yield unpack_tokens(cut(prompt, start, count(prompt)))).startswith(text):
            continue
        tokens = yield from _length(prompt, start, text)
        if tokens is not None:
            return call.turn.call, tokens
    return None


def with_same_text(calls: Sequence[Call], text: Text) -> tuple[Call, ...]:
    """`calls` of one episode. Those without `same_text` get what `find_same_text` finds among the earlier ones."""
    out: list[Call] = []
    kinds: dict[tuple[str, str], list[Packed]] = {}
    for call in sorted(calls, key=lambda call: (call.started_at, call.call)):
        earlier = kinds.setdefault((call.model, call.agent), [])
        if call.same_text is None and earlier:
            search = find_same_text(pack_tokens(call.prompt_token_ids), earlier)
            call = dataclasses.replace(call, same_text=_run(search, call.model, text))
        out.append(call)
        earlier.append(pack(call))
    return tuple(out)


def _run(search: Decoding, model: str, text: Text) -> Found | None:
    try:
        ids = next(search)
        while True:
            ids = search.send(text(model, ids))
    except StopIteration as ended:
        found: Found | None = ended.value
        return found


def _length(prompt: bytes, start: int, text: str) -> Generator[tuple[int, ...], str, int | None]:
    """The number of tokens `prompt` has up to the end of `text`, which begins at token `start`; None if none ends
    there."""
    low, high = start, count(prompt)
    while high - low > 1:
        middle = (low + high) // 2
        if len((yield unpack_tokens(cut(prompt, start, middle)))) < len(text):
            low = middle
        else:
            high = middle
    for end in range(high, min(high + SLACK, count(prompt)) + 1):
        if (yield unpack_tokens(cut(prompt, start, end))) == text:
            return end
    return None
