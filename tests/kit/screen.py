"""A small terminal: what a program's output looks like on it. It knows what `ajet_sdk.top` writes and refuses the rest.
"""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\r\n|\r|\n)|([^\x1b\r\n]+)")
_CUT = re.compile(r"(\x1b(\[[?0-9;]*)?|\r)\Z")


class Screen:
    """`rows` of `columns`, the first screen and the second one; ``cursor_shown`` and ``second`` tell its state."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self.second, self.cursor_shown = False, True
        self._cells = {False: self._empty(), True: self._empty()}
        self._at = (0, 0)
        self._left = ""

    def _empty(self) -> list[list[str]]:
        return [[" "] * self.columns for _ in range(self.rows)]

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells[self.second]]

    def feed(self, text: str) -> None:
        """Take what was written, cut anywhere; a line too long or a screen too full is an error: it would scroll."""
        text = self._left + text
        cut = _CUT.search(text)
        self._left = "" if cut is None else cut[0]
        text = text[: len(text) - len(self._left)]
        end = 0
        for part in _PART.finditer(text):
            assert part.start() == end, f"not understood: {text[end : part.start()]!r}"
            end = part.end()
            code, letter, newline, shown = part.groups()
            if letter is not None:
                self._obey(code, letter)
            elif newline is not None:
                row, column = self._at
                self._at = (row + ("\n" in newline), 0 if "\r" in newline else column)
                assert self._at[0] < self.rows, "the screen scrolled"
            else:
                self._write(shown)
        assert end == len(text), f"not understood: {text[end:]!r}"

    def _write(self, text: str) -> None:
        row, column = self._at
        for char in text:
            assert char.isprintable(), repr(char)
            assert column < self.columns, f"the line is too long: {text!r}"
            self._cells[self.second][row][column] = char
            column += 1
        self._at = (row, column)

    def _obey(self, code: str, letter: str) -> None:
        row, column = self._at
        cells = self._cells[self.second]
        match code, letter:
            case "?1049", "h" | "l":
                self.second = letter == "h"
                self._at = (0, 0)
            case "?25", "h" | "l":
                self.cursor_shown = letter == "h"
            case "", "H":
                self._at = (0, 0)
            case "", "K":
                cells[row][column:] = [" "] * (self.columns - column)
            case "", "J":
                cells[row][column:] = [" "] * (self.columns - column)
                cells[row + 1 :] = [[" "] * self.columns for _ in range(self.rows - row - 1)]
            case _, "m":
                pass
            case _:
                raise AssertionError(f"not understood: CSI {code}{letter}")
