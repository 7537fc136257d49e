"""The guide's table of who failed: the page, and the decision, say the same."""

from __future__ import annotations

import pytest

from ajet_sdk.rewards.decision import Earns, Fails, GaveUp, Given, NoNumber, Number, Said, Stands, decide
from tests.kit.source import ROOT
from tests.kit.who_failed import PAGE, ROWS, WORLD, Row, page_table

ENDS: dict[str, tuple[Given, GaveUp | None, Said | None]] = {
    "exit 0": (Given.NOTHING, None, Number(1.0, fallback=True)),
    "exit 1": (Given.NOTHING, None, Number(0.0, fallback=True)),
    "killed": (Given.NOTHING, None, Number(0.0, fallback=True)),
    "exit 75": (Given.NOTHING, GaveUp("exit code 75", world=True), Number(0.0, fallback=True)),
    "exit-code 0": (Given.NOTHING, None, Number(1.0)),
    "exit-code 1": (Given.NOTHING, None, Number(0.0)),
    "stdout 1": (Given.NOTHING, None, Number(1.0)),
    "stdout 0, exit 1": (Given.NOTHING, None, Number(0.0)),
    "stdout nothing": (Given.NOTHING, None, NoNumber("")),
    "file 1": (Given.NOTHING, None, Number(1.0)),
    "file 0, exit 1": (Given.NOTHING, None, Number(0.0)),
    "file nothing": (Given.NOTHING, None, NoNumber("")),
    "grader 1": (Given.NOTHING, None, Number(1.0)),
    "grader 0": (Given.NOTHING, None, Number(0.0)),
    "grader nothing": (Given.NOTHING, None, NoNumber("")),
    "grader fails": (Given.NOTHING, None, NoNumber("", grader=True)),
    "returns 1": (Given.NOTHING, None, Number(1.0)),
    "returns 0": (Given.NOTHING, None, Number(0.0)),
    "returns nothing": (Given.NOTHING, None, None),
    "raises": (Given.NOTHING, GaveUp("ValueError", world=False), None),
    "rewards": (Given.FINAL, None, Number(1.0, fallback=True)),
    "rewards, exit 1": (Given.FINAL, None, Number(0.0, fallback=True)),
    "rewards, stdout 1": (Given.FINAL, None, Number(1.0)),
    "header": (Given.STEPS, None, Number(1.0, fallback=True)),
    "header, exit 1": (Given.STEPS, None, Number(0.0, fallback=True)),
    "route, exit 1": (Given.FINAL, None, Number(0.0, fallback=True)),
}
"""Each end of the table as what the decision is told."""


def test_the_page_has_the_table() -> None:
    assert page_table() in (ROOT / PAGE).read_text()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.failed}: {row.ends}")
def test_the_decision_says_what_the_row_says(row: Row) -> None:
    for cell in row.cells:
        was, ended, said = ENDS[cell]
        decided = decide(was, "lost" if row.failed == WORLD else None, ended, said)
        if row.again:
            assert isinstance(decided, Fails) and decided.world, cell
        elif row.failed == WORLD:
            assert isinstance(decided, Stands), cell
        elif isinstance(said, Number):
            assert decided == Earns(said.value), cell
