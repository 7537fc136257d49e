"""What a run says that waits for long."""

from __future__ import annotations

from ajet_sdk.play.patience import AGAIN_S, LONG_S, Patience


def test_what_lasts_is_told_and_again_after_minutes() -> None:
    lines: list[str] = []
    now = [100.0]
    patience = Patience(lines.append, lambda: now[0])
    patience.waits("a", "one", 100.0)
    now[0] += LONG_S - 1
    patience.waits("a", "one", now[0])
    patience.ends("a")
    now[0] += 2
    patience.waits("a", "two", now[0])
    assert not lines, "what ended began anew"
    now[0] += LONG_S
    for _ in range(3):
        patience.waits("a", "three", now[0])
        patience.waits("b", "another", now[0] - LONG_S)
    assert lines == ["waiting: three"]
    now[0] += AGAIN_S
    patience.waits("b", None, 0.0)
    patience.waits("b", "as of now", now[0])
    patience.waits("a", "three", now[0])
    assert lines == ["waiting: three"] * 2
