"""What can be held of plain English by counting: words to avoid, and how long a sentence may be.

Tables, blocks of code, headings and pictures are no prose. A piece of code in a sentence, or a list of such,
counts as one word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.kit.readme import FENCE

MOST_WORDS = 30
AVOIDED = re.compile(
    r"\b(all the same|whoever|for good|beside|so that no|of which|upon|thereof|as the case may be|"
    r"(?:is|are|was|were|has|have|had) to be)\b",
    re.IGNORECASE,
)
_NO_PROSE = re.compile(r"^ *(?:\||#|<|!\[).*$", re.MULTILINE)
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"(?:`[^`]*`|``.*?``)(?:(?:, and|,| and| or) (?:`[^`]*`|``.*?``))*")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")


def paragraphs(page: str) -> list[str]:
    """The prose of a Markdown page: its paragraphs and the items of its lists, each on one line."""
    text = _NO_PROSE.sub("", FENCE.sub("\n\n", page))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", _ITEM.sub("\n\n", text)) if part.strip()]


def faults(paragraph: str) -> Iterator[str]:
    """The words to avoid in `paragraph`, and its sentences of more than `MOST_WORDS` words."""
    plain = _CODE.sub("CODE", _LINK.sub(r"\1", paragraph))
    yield from (f"{match[0]!r} in: {plain}" for match in AVOIDED.finditer(plain))
    for sentence in _END.split(plain):
        count = len(sentence.split())
        if count > MOST_WORDS:
            yield f"{count} words: {sentence}"
