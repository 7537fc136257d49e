"""Groups are not made by speed, whatever a lease asks for and whatever becomes of the quick ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.state import LedgerSettings
from tests.kit.ledger_rig import LedgerRig

QUICK_S, SLOW_S, LATE_S = 5.0, 100.0, 61.0


def opened(size: int, number: int = 0) -> tuple[LedgerRig, list[str]]:
    rig = LedgerRig(LedgerSettings(group_size=size, idle_timeout=1e6, wall_timeout=1e6), watch=True)
    rig.announce(version=0, run="a")
    return rig, [rig.open(task="t") for _ in range(number or size)]


def ends(rig: LedgerRig, episodes: Sequence[str], *rewards: float, after: float = 0.0, version: int = 0) -> None:
    rig.at += after
    for episode, reward in zip(episodes, rewards, strict=True):
        rig.ends(episode, reward, version=version)


def leased(rig: LedgerRig, **asked: object) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Groups, each with those that it is compared with besides."""
    found = list[tuple[tuple[str, ...], tuple[str, ...]]]()
    for _ in range(10):
        if (batch := rig.lease(groups=1, **asked)) is not None:
            known = rig.state.batches[batch]
            found += [(names, known.earlier.get(names[0], ())) for _, names in known.groups]
    return found


def late(rig: LedgerRig) -> None:
    rig.later(LATE_S)


def test_a_slow_success_among_quick_failures_is_trained_where_groups_without_a_signal_are_dropped() -> None:
    rig, names = opened(4)
    ends(rig, names[:3], 0.0, 0.0, 0.0, after=QUICK_S)
    late(rig)
    assert leased(rig, signal=True, min_group_size=2) == []
    assert {rig.state_of(name) for name in names[:3]} == {"discarded"}
    ends(rig, names[3:], 1.0, after=SLOW_S)
    assert leased(rig, signal=True, min_group_size=2) == [((names[3],), tuple(names[:3]))]


def test_where_only_whole_groups_are_leased_who_is_late_is_waited_for() -> None:
    rig, names = opened(4, 16)
    slow = names[3::4]
    ends(rig, [name for name in names if name not in slow], *[0.1] * 12, after=QUICK_S)
    late(rig)
    assert leased(rig) == []
    ends(rig, slow, *[0.9] * 4, after=SLOW_S)
    assert leased(rig) == [(tuple(names[at : at + 4]), ()) for at in range(0, 16, 4)]


def test_a_whole_group_is_compared_with_itself_whatever_its_size() -> None:
    rig, names = opened(8)
    ends(rig, names, *range(8))
    groups = leased(rig, group_size=4)
    assert groups == [(tuple(names[:4]), ()), (tuple(names[4:]), ())]


@pytest.mark.parametrize("archives", [0, 1])
def test_who_is_late_finds_its_group_however_many_ended_since(archives: int) -> None:
    rig, names = opened(4)
    ends(rig, names[:3], 0.0, 0.5, 1.0, after=QUICK_S)
    late(rig)
    rig.ack(rig.batch(groups=1, min_group_size=2))
    for _ in range(archives):
        rig.archive(0)
    ends(rig, names[3:], 1.0, after=SLOW_S)
    assert leased(rig, min_group_size=2) == [((names[3],), tuple(names[:3]))]
    batch = next(reversed(rig.state.batches))
    rig.ack(batch)
    rig.archive(0)
    assert not rig.state.episodes, "then they are needed no more"


def test_another_run_has_another_baseline() -> None:
    rig, names = opened(4)
    ends(rig, names[:3], 0.1, 0.1, 0.1, after=QUICK_S)
    late(rig)
    rig.ack(rig.batch(groups=1, min_group_size=2))
    rig.announce(version=0, run="b")
    ends(rig, names[3:], 0.9, after=SLOW_S)
    rig.at += 1e3
    assert leased(rig, min_group_size=2) == []


def test_what_staleness_leaves_of_a_group_is_not_filled_up() -> None:
    rig, names = opened(4)
    ends(rig, names[:2], 0.0, 1.0, after=QUICK_S)
    rig.announce(version=3, run="a")
    assert leased(rig, max_staleness=1, min_group_size=2) == []
    new = [rig.open(task="t") for _ in range(2)]
    ends(rig, names[2:], 0.0, 1.0, after=QUICK_S, version=3)
    assert leased(rig, max_staleness=1, min_group_size=2) == [(tuple(names[2:]), tuple(names[:2]))]
    assert {rig.state_of(name) for name in new} == {"open"}


def test_the_time_of_a_lease_is_no_time_of_play() -> None:
    rig, names = opened(4)
    ends(rig, names[:3], 0.0, 0.5, 1.0, after=QUICK_S)
    late(rig)
    batch = rig.batch(groups=1, min_group_size=2, lease_s=300.0)
    rig.at += 300.0
    rig.run([ev.BatchReturned(rig.at, batch, "expired")])
    known = rig.state.seats.queues.table.values()
    assert [group.slowest for queue in known for group in queue.groups.values()] == [QUICK_S]
