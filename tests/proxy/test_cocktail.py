"""Sixty leases of three lanes at a running daemon, while one lane is stopped and started again.

Whatever order of turns the daemon has: an oracle tries them all. It knows the shares, what each lane has, and how many
groups were asked for. If no order of turns that keeps the law explains what was leased, the law was broken.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from ajet_sdk.routes import Lease, SetMix, lane_of
from ajet_trainer.link import Link
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.kit.stub_process import stub_process

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")

SHARES = {"math": 0.5, "code": 0.3, "web": 0.2}
EXACT = {lane: Fraction(str(share)) for lane, share in SHARES.items()}
LEASES, SIZE, MOST = 60, 2, 3
STOPPED, STOPS, STARTS = "code", 20, 32
"""This lane is played before the first and from the second of these leases on."""
WAIT_S = 0.2


class Turns(NamedTuple):
    """One way in which the turns may have gone: how many each lane was dealt, and how many it has lent."""

    dealt: tuple[tuple[str, int], ...]
    owed: tuple[tuple[str, int], ...]


class Oracle:
    """Every way in which turns may have been dealt so far, so that each lane is within one turn of its share."""

    def __init__(self) -> None:
        none = tuple((lane, 0) for lane in SHARES)
        self.ways = {Turns(none, none)}

    def takes(self, lane: str, has: Mapping[str, int], most: int) -> None:
        """A group of `lane` was leased, where lanes had so many, in a lease of `most` groups."""
        self.ways = {after for way in self.ways for after in self._after(way, lane, has, most)}

    def _after(self, way: Turns, taken: str, has: Mapping[str, int], most: int) -> Iterator[Turns]:
        dealt = dict(way.dealt)
        turn = sum(dealt.values()) + 1
        for due in SHARES:
            ahead = {lane: number + (lane == due) - EXACT[lane] * turn for lane, number in dealt.items()}
            owed = dict(way.owed)
            if all(abs(one) < 1 for one in ahead.values()) and self._goes_to(due, taken, owed, has):
                if taken != due and owed[due] < most:
                    owed[due] += 1
                    owed[taken] -= 1
                now = {lane: number + (lane == due) for lane, number in dealt.items()}
                yield Turns(tuple(now.items()), tuple(owed.items()))

    @staticmethod
    def _goes_to(due: str, taken: str, owed: Mapping[str, int], has: Mapping[str, int]) -> bool:
        """Whether the turn of `due` may go to `taken`: a debt is paid first, and only who has nothing lends."""
        lenders = [lane for lane, number in owed.items() if number > 0 and has[lane]]
        if owed[due] < 0 and lenders:
            return taken in lenders
        return taken == due if has[due] else bool(has[taken])


@contextmanager
def stage(folder: Path) -> Iterator[tuple[Rig, Link]]:
    with (
        stub_process() as engine, ProxyProcess(engine, folder / "data", options=["--group-size", str(SIZE)]) as proxy,
        Rig(proxy.url) as rig, closing(Link(proxy.url)) as link,
    ):
        link.announce("stub", 0)
        link.direct(SetMix(SHARES, lane_wait_s=WAIT_S))
        yield rig, link


def play(rig: Rig, task: str) -> None:
    """A whole group."""
    for number in range(SIZE):
        episode = rig.open(task=task)
        rig.chat(episode, max_tokens=1)
        rig.reward(episode, float(number))


def test_lanes_keep_their_shares_over_sixty_leases_while_one_is_stopped_and_started(tmp_path: Path) -> None:
    dice, oracle = random.Random(0), Oracle()
    has, leased, order = Counter[str](dict.fromkeys(SHARES, 0)), Counter[str](), list[str]()
    with stage(tmp_path) as (rig, link):
        for number in range(LEASES):
            groups = dice.randint(1, MOST)
            if number == STARTS:
                assert rig.get("/mix").json()["lanes"][STOPPED]["owed"] > 0
            for lane in SHARES:
                while has[lane] < groups and not (lane == STOPPED and STOPS <= number < STARTS):
                    play(rig, f"{lane}/{sum(leased.values())}-{has[lane]}")
                    has[lane] += 1
            batch = link.lease(Lease(groups=groups, wait_s=30.0))
            assert batch is not None
            assert len(batch.groups) == groups
            for lane in (lane_of(group.task) for group in batch.groups):
                oracle.takes(lane, has, groups)
                assert oracle.ways, f"no order of turns explains {[*order, lane]}"
                has[lane] -= 1
                leased[lane] += 1
                order.append(lane)
                if number < STOPS:
                    assert all(abs(leased[one] - share * len(order)) < 1 for one, share in EXACT.items()), order
            link.ack(batch.batch, number)
        status, mix = rig.status(), rig.get("/mix").json()["lanes"]
    assert status["episodes"]["trained"] == SIZE * sum(leased.values())
    assert {lane: mix[lane]["leased"] for lane in SHARES} == leased
    assert {lane: mix[lane]["owed"] for lane in SHARES} in [dict(way.owed) for way in oracle.ways]
    assert not any(mix[lane]["owed"] for lane in SHARES), "what was borrowed is given back"


def test_the_oracle_notices_a_turn_that_breaks_the_law() -> None:
    """With shares of 0.5, 0.3 and 0.2, code has 1 of the first 2 groups, and not both."""
    oracle, plenty = Oracle(), dict.fromkeys(SHARES, 9)
    oracle.takes("code", plenty, 1)
    assert oracle.ways
    oracle.takes("code", plenty, 1)
    assert not oracle.ways


def test_the_oracle_notices_a_loan_that_is_not_given_back() -> None:
    oracle, without = Oracle(), {"math": 9, "code": 0, "web": 9}
    for lane in ("math", "web", "math", "math"):
        oracle.takes(lane, without, 4)
    assert all(dict(way.owed)["code"] > 0 for way in oracle.ways) and oracle.ways
    for _ in range(9):
        oracle.takes("math", dict.fromkeys(SHARES, 9), 4)
    assert not oracle.ways
