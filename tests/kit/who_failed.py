"""The guide's table of who failed and what the episode becomes, as data.

The page shows `page_table`, word for word. Tests play each row for real.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = "docs/guide/sdk.md"
HEAD = ("who failed", "how the agent ends", "the episode")
PLAYED_AGAIN = "is the world's failure: `infra`, played again"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the page: who `failed`, how the agent `ends`, and what the episode `becomes`. `cells` names the ends by
    which tests play it; a world's failure is `again`."""

    failed: str
    ends: str
    becomes: str
    cells: tuple[str, ...]
    again: bool


WORLD, AGENT, NOBODY = "the world", "the agent", "nobody"
ROWS = (
    Row(WORLD, "exit code 0, and no other reward", PLAYED_AGAIN, ("exit 0", "exit-code 0"), True),
    Row(WORLD, "another exit code, or a signal", PLAYED_AGAIN, ("exit 1", "killed", "exit-code 1", "exit 75"), True),
    Row(WORLD, "a number in its output or the file, at any exit", f"{PLAYED_AGAIN}, whatever the number",
        ("stdout 1", "stdout 0, exit 1", "file 1", "file 0, exit 1"), True),
    Row(WORLD, "no number where one is asked for", PLAYED_AGAIN, ("stdout nothing", "file nothing"), True),
    Row(WORLD, "`--reward-cmd` says anything, or fails", f"{PLAYED_AGAIN}, whatever it says",
        ("grader 1", "grader 0", "grader nothing", "grader fails"), True),
    Row(WORLD, "a function returns a number, or raises", f"{PLAYED_AGAIN}, whatever the number",
        ("returns 1", "returns 0", "returns nothing", "raises"), True),
    Row(WORLD, "`reward()`, a header or the route gave a reward", "keeps that reward, at any exit",
        ("rewards", "rewards, exit 1", "rewards, stdout 1", "header", "header, exit 1", "route, exit 1"), False),
    Row(AGENT, "anything, after a 400, 413 or 422", "as if nothing had failed",
        ("exit 0", "exit 1", "stdout 1"), False),
    Row(NOBODY, "anything", "as the options above say", ("exit 0", "exit 1", "stdout 1", "grader fails"), False),
)  # fmt: skip


def page_table() -> str:
    """The table as it stands on the page."""
    rows = (HEAD, ("---",) * 3, *((row.failed, row.ends, row.becomes) for row in ROWS))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
