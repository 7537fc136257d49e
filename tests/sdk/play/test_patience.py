"""The words of a run that waits for long."""

from __future__ import annotations

from ajet_sdk.play.patience import AGAIN_S, LONG_S, Patience


def test_what_lasts_is_told_and_again_after_minutes() -> None:
    now = [100.0]
    patience = Patience(lambda: now[0])
    said = [patience.waits("a", "one", 100.0)]
    now[0] += LONG_S - 1
    said.append(patience.waits("a", "one", now[0]))
    patience.ends("a")
    now[0] += 2
    said.append(patience.waits("a", "two", now[0]))
    assert said == [None] * 3, "what ended began anew"
    now[0] += LONG_S
    assert patience.waits("a", "three", now[0]) == "waiting: three"
    assert patience.waits("a", "three", now[0]) is patience.waits("b", "another", now[0] - LONG_S) is None
    now[0] += AGAIN_S
    patience.waits("b", None, 0.0)
    assert patience.waits("b", "as of now", now[0]) is None
    assert patience.waits("a", "three", now[0]) == "waiting: three"
