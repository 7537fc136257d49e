"""The conversation that the canned engine and the scripted agents have: known to both, so that nothing is looked up.

Turn after turn the agent says a sentence and gets an answer, streamed in even turns and as a document in odd ones. Each
prompt begins, token for token, with everything before it, as it does with a real engine and an agent that appends.
"""

from __future__ import annotations

from functools import cache
from typing import Any

CHUNKS = 40
"""Events of a streamed answer; the first carries no token."""
LETTERS = 200
ASK = "hello " * 50


@cache
def sampled(count: int) -> tuple[int, ...]:
    """The tokens of an answer of `count` tokens: letters, so that their text is their characters."""
    return tuple(97 + i % 26 for i in range(count))


def answer(turn: int) -> tuple[int, ...]:
    return sampled(LETTERS if turn % 2 else CHUNKS - 1)


@cache
def prompt(turn: int) -> tuple[int, ...]:
    """The token ids of the prompt of `turn`."""
    ids = tuple(range(300))
    for before in range(turn):
        ids += (*answer(before), *range(1000, 1020))
    return ids


def messages(turn: int) -> list[dict[str, Any]]:
    """The messages that an agent sends in `turn`: the whole history and the next sentence."""
    out = [{"role": "user", "content": ASK}]
    for before in range(turn):
        out += [{"role": "assistant", "content": "".join(map(chr, answer(before)))}, {"role": "user", "content": ASK}]
    return out
