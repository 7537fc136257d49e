"""A program whose file changes, and programs that fail as soon as they begin."""

from __future__ import annotations

import pytest

from ajet_sdk.errors import AjetError
from ajet_sdk.play.watching import Changes, Streak


@pytest.mark.parametrize("looks", ["aa", "abb.b", "abcc.b", "ab_cc.", "a__aa", "abb.aa."])
def test_each_change_is_told_once_it_stays(looks: str) -> None:
    """A look that finds no file is ``_``, and each that is told of has a dot behind it."""
    found = iter([None if one == "_" else one for one in looks if one != "."])
    changes = Changes(lambda: next(found))
    assert looks[0] + "".join(one + "." * changes.look() for one in looks[1:] if one != ".") == looks


def test_a_streak_that_waits_for_a_change() -> None:
    lines: list[str] = []
    streak = Streak(2, waits=True, say=lines.append)
    for well in (False, False, True, False, False):
        streak.began(well=well)
        assert not streak.held()
    streak.began(well=False)
    streak.began(well=False)
    assert streak.held()
    (line,) = lines
    assert line.startswith("the program failed 3 times in a row within 2 s, without a call to a model. Nothing more")
    streak.changed()
    assert not streak.held()


def test_a_streak_that_ends_the_run() -> None:
    streak = Streak(4, waits=False)
    for _ in range(4):
        assert not streak.held()
        streak.began(well=False)
    with pytest.raises(AjetError, match="failed 4 times in a row"):
        streak.held()
