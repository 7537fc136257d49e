from __future__ import annotations

import threading

from ajet_sdk.errors import NotFound
from ajet_trainer.keeper import Keeper


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


def test_held_leases_are_extended_in_the_background_until_released() -> None:
    link = Extended()
    with Keeper(link, 0.03) as keeper:
        keeper.hold("gone")
        keeper.hold("b")
        assert keeper.held == ("gone", "b")
        assert link.enough.wait(5)
        keeper.release("gone")
        keeper.release("never held")
        assert keeper.held == ("b",)
    assert {name for name, _ in link.calls} == {"gone", "b"}
    assert {lease for _, lease in link.calls} == {0.03}
    count = len(link.calls)
    keeper.extend_all()
    assert link.calls[count:] == [("b", 0.03)]
