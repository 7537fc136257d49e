"""Whether a prompt begins with the text of an earlier call, though not with its tokens.

The core has no tokenizer: `find` asks for the text of token ids as it needs it, and whoever runs it answers (see
`ajet_proxy.io.engines.same_text`). What is compared is the text from shortly before the first token that differs,
because a decoder may write a token otherwise at the beginning of a text than within it.

Invariant: what is found is exact. The first tokens of the prompt, as many as are told, decode to the very text to which
what the call read and sampled decodes. Text that ends in the middle of a character is never the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace

from ajet_proxy.core.tokens import common_prefix, count, cut, pack_tokens, unpack_tokens
from ajet_proxy.core.trajectory.timeline import Packed, pack
from ajet_sdk.sample import Call

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


def find(prompt: bytes, calls: Iterable[Packed]) -> Decoding:
    """The call of `calls` (of one model and agent) whose prompt and sampled tokens are, as text, the beginning of
    `prompt`, with the number of the prompt's tokens that say it; None if there is none, or if the prompt begins with
    these very tokens. Yields token ids, and is sent their text."""
    near = sorted(((common_prefix(prompt, call.text), call.turn.rank, call) for call in calls), key=_near, reverse=True)
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


def _near(item: tuple[int, tuple[float, str], Packed]) -> tuple[int, tuple[float, str]]:
    return item[:2]


def with_same_text(calls: Sequence[Call], text: Text) -> tuple[Call, ...]:
    """`calls` of one episode, those that say nothing of their texts with what `find` finds among the earlier ones."""
    out: list[Call] = []
    kinds: dict[tuple[str, str], list[Packed]] = {}
    for call in sorted(calls, key=lambda call: (call.started_at, call.call)):
        earlier = kinds.setdefault((call.model, call.agent), [])
        if call.same_text is None and earlier:
            call = replace(call, same_text=_run(find(pack_tokens(call.prompt_token_ids), earlier), call.model, text))
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
    """How many tokens of `prompt` end where `text`, which begins at token `start`, ends; None if none does."""
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
