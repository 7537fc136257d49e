from __future__ import annotations

import threading
from typing import cast

from ajet_sdk.errors import NotFound, ProxyUnreachable
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link


class Extended:
    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.enough = threading.Event()

    def extend(self, batch: str, lease_s: float) -> None:
        self.calls.append((batch, lease_s))
        if len(self.calls) >= 4:
            self.enough.set()
        if batch == "gone":
            raise NotFound("no such lease")
        if batch == "frozen":
            raise ProxyUnreachable("no answer")


def test_held_leases_are_extended_in_the_background_until_released() -> None:
    link = Extended()
    with Keeper(cast(Link, link), 0.03) as keeper:
        keeper.hold("gone")
        keeper.hold("b")
        assert keeper.held == ("gone", "b")
        assert link.enough.wait(300)
        keeper.release("gone")
        keeper.release("c")
        assert keeper.held == ("b",)
    assert set(link.calls) == {("gone", 0.03), ("b", 0.03)}
    count = len(link.calls)
    keeper.turn()
    assert link.calls[count:] == [("b", 0.03)]


def test_a_daemon_that_does_not_answer_is_asked_once_a_round() -> None:
    link = Extended()
    keeper = Keeper(cast(Link, link), 1.0)
    for batch in ("gone", "a", "frozen", "b"):
        keeper.hold(batch)
    for _ in range(2):
        keeper.turn()
    assert [name for name, _ in link.calls] == ["gone", "a", "frozen"] * 2
