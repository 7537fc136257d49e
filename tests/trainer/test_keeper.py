from __future__ import annotations

import threading
from typing import cast

import pytest

from ajet_sdk.errors import Conflict, NotFound, ProxyUnreachable
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link


class Extended:
    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.said: list[str] = []
        self.enough = threading.Event()
        self.replaced = False

    def within(self, deadline_s: float) -> Extended:
        assert deadline_s == 0
        return self

    def says(self, word: str) -> None:
        self.said.append(word)
        if len(self.said) == 1:
            raise ValueError("no JSON")
        if self.replaced:
            raise Conflict("another trainer is at work", code="other_trainer")

    def extend(self, batch: str, lease_s: float) -> None:
        self.calls.append((batch, lease_s))
        if len(self.calls) >= 4:
            self.enough.set()
        if batch == "gone":
            raise NotFound("no such lease")
        if batch == "frozen":
            raise ProxyUnreachable("no answer")


def test_held_leases_are_extended_in_the_background_until_released() -> None:
    """A sign of life that fails is one that is missed."""
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
    assert set(link.said[:-1]) == {"beats"}
    assert link.said[-1] == "leaves"


def test_a_daemon_that_does_not_answer_is_asked_once_a_round_and_each_beat_until_it_answers() -> None:
    link = Extended()
    link.said.append("comes")
    keeper = Keeper(cast(Link, link), 300.0)
    for batch in ("gone", "a", "frozen", "b"):
        keeper.hold(batch)
    for _ in range(2):
        with pytest.raises(ProxyUnreachable):
            keeper.turn()
    keeper.release("frozen")
    for _ in range(2):
        keeper.turn()
    assert [name for name, _ in link.calls] == [*["gone", "a", "frozen"] * 2, "gone", "a", "b"]
    assert link.said == ["comes", *["beats"] * 4]


def test_a_trainer_that_is_refused_keeps_what_it_holds() -> None:
    link = Extended()
    link.said.append("comes")
    link.replaced = True
    keeper = Keeper(cast(Link, link), 300.0)
    keeper.hold("a")
    keeper.turn()
    assert link.calls == [("a", 300.0)]
