"""Why a new timeline began: the first difference between a prompt and the timeline nearest to it, named.

The core sees token ids and no text, so a name is a reading of where the difference stands and of what comes after it.
The nearest timeline has an earlier call of the same model and agent, and shares the most leading tokens with the
prompt. Only its calls that started earlier count. Other calls may have sampled parts of its first prompt, as in a fork;
these are among its generations. With ``at`` the first differing position, the first rule that fits gives the name:

==================  ====================================================================================================
`parallel`          the whole prompt is history of the timeline: the same prompt again, or a fork from an earlier point.
`new_chain`         nothing is shared.
`template`          ``at`` is the last token of a generation, mostly the stop token, or its first and its end still
                    follows. The template writes the turn in other tokens than the engine did.
`retokenized`       ``at`` is inside a generation, and the prompt comes back to it: its tail or its stop token follows.
`retokenized`       ``at`` is the first token of a short generation, and its stop token follows after fewer tokens.
`history_edited`    ``at`` is inside a generation, and the prompt does not come back: the answer was cut or replaced.
`tools_changed`     ``at`` is in the first half of the first prompt, where system text and tools stand, and the next
                    generation still follows whole. The conversation goes on under a new head.
`history_edited`    ``at`` is in prompt tokens elsewhere, and the next generation follows whole.
`template`          ``at`` is in prompt tokens behind the last message, and only the tail of the next generation
                    follows there. Its reasoning was taken out together with the template's opening of it.
`parallel`          ``at`` is in prompt tokens after a generation: two continuations of one shared history.
`compacted`         ``at`` is in the first prompt, and the timeline has several calls. The prompt is at most half as
                    long as the timeline's last one, but at least an eighth of it is shared. A summary took the place
                    of history.
`new_chain`         else: a shared beginning, such as one system prompt, and another conversation. Its messages may
                    quote what was sampled.
==================  ====================================================================================================

If the call's continuity has found out that the agent itself left something out (`EDITED`), the name is `history_edited`
and not one of those that are `DRIFTED`.

A name that is `VAGUE` says nothing of what was sampled. The nearest timeline may have parted at that very place from
the answer that should stand there. So the prompt is compared with the timeline of that answer as well. If that is the
difference, the name is one that is `DRIFTED`.

Limits: if an agent edits a generation but keeps its end, even the stop token alone, the name is `retokenized`. It is
the same for a short answer that the agent put into fewer tokens. A short answer that became as many tokens or more,
from its first on, reads as `history_edited`. A changed first user message reads as `tools_changed` if it lies in the
first half of the prompt. Another conversation after a long system prompt reads as `compacted`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ajet_proxy.core.tokens import common_prefix, count, cut, find

DRIFTED = ("retokenized", "template")
"""Names that mean: the same text, other tokens."""
EDITED = ("words_left_out", "reasoning_left_out")
"""Words of `core.continuity.memory` for a history that its agent has changed, which the engine then cannot have read as
it was sampled: what looks like drift there is `history_edited`."""
VAGUE = ("new_chain", "parallel", "compacted")
"""Names for a difference between things that both timelines were given."""
OPENING = 4
"""Tokens that a template may write in place of the reasoning that it took out, as an empty block."""
TAIL = 8
"""Tokens at the end of a generation that must be found again to say that the prompt comes back to it."""


def broken_by(prompt: bytes, history: bytes, spans: Sequence[tuple[int, int]]) -> str:
    """The name of the first difference.

    `prompt` and `history` (the nearest timeline up to its last earlier call) are token texts; `spans` are the sampled
    ranges of `history`, at least one, in order.
    """
    at, length = common_prefix(prompt, history), count(prompt)
    if at == length:
        return "parallel"
    if at == 0:
        return "new_chain"
    ahead = [(start, end) for start, end in spans if start < end and at < end]
    if ahead and ahead[0][0] <= at:
        return _in_generation(prompt, history, at, ahead[0])
    return _in_prompt(prompt, history, at, spans, ahead)


def behind(prompt: bytes, text: bytes, start: int) -> int | None:
    """The position in `prompt` behind the answer that `text` has from `start` on, if it goes on from that; else None.

    The agent or the template may have left out its reasoning or have changed its end, and a system prompt before it may
    be another one.
    """
    at, end, length = common_prefix(prompt, text), count(text), count(prompt)
    if at == length or start == end:
        return None
    if at < start - OPENING or (at < start and find(text, cut(text, end - 1, end), at, start) >= 0):
        found, name = find(prompt, cut(text, start, end), at, length), broken_by(prompt, text, [(start, end)])
        return found + end - start if found >= 0 and name in (*DRIFTED, "history_edited", "tools_changed") else None
    kept, most = 0, end - max(at, start)  # tokens at the end of the answer that the prompt has, too, and may have
    while kept < most:
        middle = (kept + most + 1) // 2
        if find(prompt, cut(text, end - middle, end), at, length) >= 0:
            kept = middle
        else:
            most = middle - 1
    if kept > (at < start):
        return find(prompt, cut(text, end - kept, end), at, length) + kept
    return at if at >= start else None


def _in_generation(prompt: bytes, history: bytes, at: int, span: tuple[int, int]) -> str:
    start, end = span
    if start < at == end - 1:
        return "template"
    length, rest = count(prompt), end - 1 - at
    if rest > (at == start) and find(prompt, cut(history, max(at + 1, end - TAIL), end), at, length) >= 0:
        return "template" if at == start else "retokenized"
    stop = find(prompt, cut(history, end - 1, end), at, min(length, at + 2 * (end - at) + TAIL))
    if stop > at > start:
        return "retokenized"
    if at < stop < end - 1 < start + TAIL:
        kept = cut(prompt, at, stop + 1) == cut(history, end - 1 - stop + at, end)
        return "template" if kept else "retokenized"
    return "history_edited"


def _in_prompt(
    prompt: bytes, history: bytes, at: int, spans: Sequence[tuple[int, int]], ahead: Sequence[tuple[int, int]]
) -> str:
    first, length = spans[0][0], count(prompt)
    if ahead:
        start, end = ahead[0]
        whole = find(prompt, cut(history, start, end), at, length)
        if whole >= 0 and cut(prompt, whole - 1, whole) == cut(history, start - 1, start):
            return "tools_changed" if at * 2 < first else "history_edited"
        if _is_opened_otherwise(prompt, history, at, start, end):
            return "template"
    if at >= first:
        return "parallel"
    if len(spans) > 1 and length * 2 <= spans[-1][0] and at * 8 >= length:
        return "compacted"
    return "new_chain"


def _is_opened_otherwise(prompt: bytes, history: bytes, at: int, start: int, end: int) -> bool:
    """Tell whether the end of the generation stands in its own place in the prompt, which parts from `history` at the
    template's opening of it. No message ends in between, as it does where a later message quotes the generation."""
    tail = max(start, end - TAIL)
    place = find(prompt, cut(history, tail, end), at, count(prompt))
    if place < 0 or find(history, cut(history, end - 1, end), at, start) >= 0:
        return False
    while tail > start and place > at and cut(prompt, place - 1, place) == cut(history, tail - 1, tail):
        place, tail = place - 1, tail - 1
    return place - at <= OPENING
