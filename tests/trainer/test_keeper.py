from __future__ import annotations

import threading

from ajet_sdk.errors import NotFound, ProxyUnreachable
from ajet_trainer.daemons import Keeper


class Extended:
    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.enough = threading.Event()

    def extend(self, daemon: str, batch: str, lease_s: float) -> None:
        self.calls.append((f"{daemon}/{batch}", lease_s))
        if len(self.calls) >= 4:
            self.enough.set()
        if batch == "gone":
            raise NotFound("no such lease")
        if daemon == "frozen":
            raise ProxyUnreachable("no answer")


def test_held_leases_are_extended_in_the_background_until_released() -> None:
    link = Extended()
    with Keeper(link, 0.03) as keeper:
        keeper.hold("a", "gone")
        keeper.hold("a", "b")
        assert keeper.held == (("a", "gone"), ("a", "b"))
        assert link.enough.wait(5)
        keeper.release("a", "gone")
        keeper.release("b", "b")
        assert keeper.held == (("a", "b"),)
    assert {name for name, _ in link.calls} == {"a/gone", "a/b"}
    assert {lease for _, lease in link.calls} == {0.03}
    count = len(link.calls)
    keeper.extend_all()
    assert link.calls[count:] == [("a/b", 0.03)]


def test_a_daemon_that_does_not_answer_is_asked_once_a_round() -> None:
    link = Extended()
    keeper = Keeper(link, 1.0)
    for daemon, batch in (("frozen", "a"), ("frozen", "b"), ("here", "gone"), ("frozen", "c"), ("here", "d")):
        keeper.hold(daemon, batch)
    for _ in range(2):
        keeper.extend_all()
    assert [name for name, _ in link.calls] == ["frozen/a", "here/gone", "here/d"] * 2
