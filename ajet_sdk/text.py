"""Text for a terminal: padded columns, counts, and names that an agent chose, made harmless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import combining, east_asian_width


def counted(items: Sequence[Any], word: str) -> str:
    """Their number, with the word: ``1 call``, ``2 calls``."""
    return f"{len(items)} {word}" if len(items) == 1 else f"{len(items)} {word}s"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of padded columns."""
    widths = [max(columns(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def plain(text: str) -> str:
    """`text` without what a terminal would obey: an agent chooses its own task and names."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def columns(text: str) -> int:
    """The columns of a terminal that `text` takes: wide characters take two, what stands above others none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)
