"""The texts of an episode's calls as a tree, in which a beginning that several of them share is kept once.

Idea: a `Text` holds only its own tokens and names the text before it. The texts after one text each begin with another
token. So the longest beginning that a prompt shares with any of them is found on one way down. It is compared once,
whether there is one conversation or a thousand, and wherever they parted.

Invariant: a beginning that was added stands there once, so the tree costs the distinct tokens. A text keeps its number
and what it says as a whole. If another text parts from the middle of it, its first half becomes a text of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ajet_proxy.core.tokens import common_prefix, count, cut, stands_at

START = -1
"""The number of the empty text, behind which all others stand."""


@dataclass(slots=True)
class Text:
    """`tokens` from position `start` on, after all of the text number `behind`. Together they are the beginning of what
    `call` read and sampled."""

    behind: int
    start: int
    tokens: bytes
    call: str

    @property
    def end(self) -> int:
        return self.start + count(self.tokens)


@dataclass(slots=True)
class Texts:
    """All texts of an episode, by their number."""

    texts: list[Text] = field(default_factory=list)
    _after: dict[tuple[int, bytes], int] = field(default_factory=dict, init=False)
    """What stands behind a text, by its first token."""
    _inner: set[int] = field(default_factory=set, init=False)
    """The texts behind which something stands."""

    def __post_init__(self) -> None:
        for number, text in enumerate(self.texts):
            self._link(number, text)

    def add(self, text: bytes, call: str) -> int:
        """The number of the text that begins with all of `text`, which `call` read and sampled."""
        number, shared = self._nearest(text)
        length = count(text)
        if shared == length:
            return number
        if number != START and shared < self.texts[number].end:
            number = self._split(number, shared)
        elif number != START and number not in self._inner:
            longer = self.texts[number]
            longer.tokens, longer.call = cut(text, longer.start, length), call
            return number
        return self._put(Text(number, shared, cut(text, shared, length), call))

    def nearest(self, prompt: bytes) -> tuple[str, int]:
        """The call that shares the longest beginning with `prompt`, and how many tokens that is; ``("", 0)`` if none
        does."""
        number, shared = self._nearest(prompt)
        return (self.texts[number].call, shared) if shared else ("", 0)

    def whole(self, number: int, end: int) -> bytes:
        """The first `end` tokens of a text together with all before it."""
        parts = []
        while number != START:
            text = self.texts[number]
            if text.start < end:
                parts.append(text.tokens)
            number = text.behind
        return cut(b"".join(reversed(parts)), 0, end)

    def wholes(self, wanted: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """`whole` for many; the beginning that one shares with the one before it is not put together again."""
        known = {START: b""}
        for number, end in wanted:
            way, at = [], number
            while at not in known:
                way.append(at)
                at = self.texts[at].behind
            text = known[at]
            for step in reversed(way):
                known = {START: b"", self.texts[step].behind: text, step: (text := text + self.texts[step].tokens)}
            yield cut(text, 0, end)

    def reached(self, calls: Iterable[tuple[int, int]]) -> dict[int, int]:
        """For each text that one of `calls` (its text, and the length of its prompt) begins with, the longest of those
        prompts. Each text is looked at once, from the longest prompt that begins with it."""
        longest: dict[int, int] = {START: 0}
        for number, length in sorted(calls, key=lambda call: -call[1]):
            while number not in longest:
                longest[number] = length
                number = self.texts[number].behind
        return longest

    def distinct(self, ends: Iterable[tuple[int, int]]) -> int:
        """Count the distinct tokens of the beginnings of texts: each is a text's number and a length."""
        longest = self.reached(ends)
        return sum(
            max(0, min(self.texts[number].end, length) - self.texts[number].start)
            for number, length in longest.items() if number != START
        )

    def holder(self, number: int, end: int) -> int:
        """The text that holds the last of the first `end` tokens of text `number`."""
        while number != START and self.texts[number].start >= end:
            number = self.texts[number].behind
        return number

    def size(self) -> int:
        """Bytes of tokens."""
        return sum(len(text.tokens) for text in self.texts)

    def _nearest(self, text: bytes) -> tuple[int, int]:
        """The number of the text that shares the longest beginning with `text`, and how many tokens that is."""
        number, at = START, 0
        while (after := self._after.get((number, cut(text, at, at + 1)))) is not None:
            tokens, number = self.texts[after].tokens, after
            if not stands_at(text, tokens, at):
                return number, at + common_prefix(tokens, cut(text, at, at + count(tokens)))
            at += count(tokens)
        return number, at

    def _split(self, number: int, at: int) -> int:
        """Make the first half of a text, up to position `at`, a text of its own; returns its number."""
        text = self.texts[number]
        half, length = at - text.start, count(text.tokens)
        first = self._put(Text(text.behind, text.start, cut(text.tokens, 0, half), text.call))
        text.behind, text.start, text.tokens = first, at, cut(text.tokens, half, length)
        self._link(number, text)
        return first

    def _put(self, text: Text) -> int:
        self.texts.append(text)
        self._link(len(self.texts) - 1, text)
        return len(self.texts) - 1

    def _link(self, number: int, text: Text) -> None:
        self._after[text.behind, cut(text.tokens, 0, 1)] = number
        self._inner.add(text.behind)
