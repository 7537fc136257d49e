"""The output of a bench: tables, aligned for the terminal and as Markdown for a page, and whether goals are met."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [title, ""]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    lines += ["", *markdown(head, rows)]
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table's lines."""
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def verdict(met: bool, goal: str, figure: str = "") -> str:
    return f"{'met    ' if met else 'NOT MET'}  {goal}" + (f": {figure}" if figure else "")


def verdicts(goals: Sequence[tuple[str, bool]]) -> bool:
    """Prints what was met and what not; whether all was."""
    sys.stdout.write("".join(f"{verdict(met, goal)}\n" for goal, met in goals) + "\n")
    return all(met for _, met in goals)
