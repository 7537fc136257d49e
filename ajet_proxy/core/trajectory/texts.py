"""The texts of an episode's calls as a tree, in which a beginning that several of them share is kept once.

Idea: a `Text` holds only its own tokens and names the text before it. The texts after one text each begin with another
token. So the longest beginning that a prompt shares with any of them is found on one way down. It is compared once,
whether there is one conversation or a thousand, and wherever they parted.

Invariant: a beginning that was added stands there once, so the tree costs the distinct tokens. A text keeps its number
and what it says as a whole. If another text parts from the middle of it, its first half becomes a text of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ajet_proxy.core.tokens import common_prefix, count, cut, stands_at

START = -1
"""The number of the empty text, behind which all others stand."""
Beginning = tuple[int, int]
"""The number of a text, and how many of its first tokens are meant, those of the texts before it included."""


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
    """The texts that stand behind a text, by their first token."""
    _inner: set[int] = field(default_factory=set, init=False)
    """The texts behind which something stands."""

    def __post_init__(self) -> None:
        for number, text in enumerate(self.texts):
            self._link(number, text)

    def add(self, text: bytes, call: str) -> int:
        """The number of the text that begins with all of `text`, which `call` read and sampled."""
        return self._add(text, call, *self.stands(text))

    def add_all(self, said: Sequence[tuple[bytes, str]]) -> list[int]:
        """`add` for what is all there is. In their order, the way to each is short from the one before it."""
        numbers, number, before = [START] * len(said), START, b""
        for place in sorted(range(len(said)), key=lambda one: said[one][0]):
            text, call = said[place]
            shared = common_prefix(before, text)
            numbers[place] = number = self._add(text, call, self.holder(number, shared), shared)
            before = text
        return numbers

    def _add(self, text: bytes, call: str, number: int, shared: int) -> int:
        """`add` for what has its first `shared` tokens in common with the text `number`, and no more with any."""
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
        number, shared = self.stands(prompt)
        return (self.texts[number].call, shared) if shared else ("", 0)

    def whole(self, number: int, end: int) -> bytes:
        """The first `end` tokens of a text together with all before it."""
        return Reader(self).whole(number, end)

    def common(self, one: Beginning, other: Beginning) -> int:
        """Count the tokens that two beginnings have in common from their first on."""
        (number, length), (partner, most) = one, other
        while number != partner:
            if partner == START or (number != START and self.texts[number].start >= self.texts[partner].start):
                length, number = min(length, self.texts[number].start), self.texts[number].behind
            else:
                most, partner = min(most, self.texts[partner].start), self.texts[partner].behind
        return min(length, most)

    def places(self) -> dict[int, int]:
        """The place of each text among all. A text stands right before those after it, which follow in the order of
        their first tokens as bytes."""
        after: dict[int, list[int]] = {}
        for number in sorted(range(len(self.texts)), key=lambda one: cut(self.texts[one].tokens, 0, 1), reverse=True):
            after.setdefault(self.texts[number].behind, []).append(number)
        places, left = dict[int, int](), [START]
        while left:
            places[number := left.pop()] = len(places)
            left += after.get(number, ())
        return places

    def reached(self, calls: Iterable[Beginning]) -> dict[int, int]:
        """For each text that one of `calls` (its text, and the length of its prompt) begins with, the longest of those
        prompts. Each text is looked at once, from the longest prompt that begins with it."""
        longest: dict[int, int] = {START: 0}
        for number, length in sorted(calls, key=lambda call: -call[1]):
            while number not in longest:
                longest[number] = length
                number = self.texts[number].behind
        return longest

    def distinct(self, ends: Iterable[Beginning]) -> int:
        """Count the distinct tokens of beginnings."""
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

    def holders(self, ends: Sequence[Beginning]) -> list[int]:
        """`holder` for many. What is above a text is gone through once."""
        found, at, text = [START] * len(ends), START, START
        for place in sorted(range(len(ends)), key=lambda one: (ends[one][0], -ends[one][1])):
            number, end = ends[place]
            at = found[place] = self.holder(at if number == text else number, end)
            text = number
        return found

    def shared_with(self, text: bytes, ends: Iterable[Beginning]) -> list[int]:
        """Count the tokens that each of `ends` and `text` have in common from their first on."""
        number, length = self.stands(text)
        known = {START: 0}
        while number != START:
            known[number] = min(length, self.texts[number].end)
            number = self.texts[number].behind
        found = []
        for number, end in ends:
            way, at = [], number
            while at not in known:
                way.append(at)
                at = self.texts[at].behind
            known.update(dict.fromkeys(way, known[at]))
            found.append(min(end, known[number]))
        return found

    def size(self) -> int:
        """Bytes of tokens."""
        return sum(len(text.tokens) for text in self.texts)

    def stands(self, text: bytes) -> Beginning:
        """The longest beginning of `text` that stands here."""
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


class Reader:
    """`Texts.whole` for one beginning after another. What a text stands behind is put together once, as long as what is
    read next stands behind it, too."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts.texts
        self._known = {START: b""}

    def whole(self, number: int, end: int) -> bytes:
        """The first `end` tokens of a text together with all before it."""
        way, at = [], number
        while at not in self._known:
            way.append(at)
            at = self._texts[at].behind
        if way:
            before = b"".join([self._known[at], *(self._texts[one].tokens for one in reversed(way[1:]))])
            text = self._texts[number]
            self._known = {START: b"", text.behind: before, number: before + text.tokens}
        return cut(self._known[number], 0, end)
