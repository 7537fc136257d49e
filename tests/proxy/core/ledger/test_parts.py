"""Commands that discard much do so in parts, between which anything may happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import parts
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.parts import Part, parted
from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_sdk.routes import Attend, Join, OpenEpisode, Policy
from tests.kit.ledger_rig import LedgerRig

EVENTS = tuple(ev.EpisodeSealed(float(number), "e") for number in range(5))
Command = Callable[[LedgerRig], Sequence[Event]]


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AT_ONCE", 2)


def test_a_part_has_no_end() -> None:
    last = EVENTS[3:]
    assert parted(EVENTS[:2], *last) == (*EVENTS[:2], *last)
    found = parted(EVENTS[:3], *last)
    assert isinstance(found, Part) and found == EVENTS[:2]
    assert not isinstance(parted((), *last), Part)


def joins(rig: LedgerRig) -> Sequence[Event]:
    body = Join("host", lane="t", revision="new", replaces_older=True)
    return rig.commands.clients.join(body, client="c", tenant="", at=rig.at)


def opens(rig: LedgerRig) -> Sequence[Event]:
    body = OpenEpisode(task="t/1", client="old", revision="new")
    return rig.commands.open_episode(body, episode="e", at=rig.at, tenant="")


def begins(rig: LedgerRig) -> Sequence[Event]:
    return rig.commands.trainers.attend(Attend("m", "new", "i", "begins"), at=rig.at)


def announces(rig: LedgerRig) -> Sequence[Event]:
    return rig.commands.trainers.announce(Policy("m", 0, run="new"), at=rig.at)


@pytest.mark.parametrize(("command", "end"), [
    (joins, ev.ClientJoined), (opens, ev.EpisodeOpened), (begins, ev.RunBegan), (announces, ev.PolicyAnnounced),
])  # fmt: skip
def test_what_is_ready_goes_in_parts_and_the_end_comes_last(command: Command, end: type[Event]) -> None:
    rig = LedgerRig(LedgerSettings(group_size=2), watch=True)
    rig.announce(version=0, run="old")
    rig.join(id="old", lane="t", revision="old", replaces_older=True)
    waiting = [rig.ready("t/1", client="old") for _ in range(7)]
    if command in (begins, announces):
        assert rig.lease(groups=1) and rig.lease(groups=1)
    found = list[Sequence[Event]]()
    while not found or isinstance(found[-1], Part):
        found.append(rig.run(command(rig)))
        assert [isinstance(event, end) for event in found[-1]].count(True) == (not isinstance(found[-1], Part))
        assert sum(isinstance(event, ev.EpisodeDiscarded) for event in found[-1]) <= parts.AT_ONCE
        if len(found) == 1:
            waiting += [rig.ready("t/1", client="old")]  # what comes between goes too
    assert {rig.state_of(name) for name in waiting} == {"discarded"}
    assert isinstance(found[-1][-1], end)


def test_batches_run_out_one_by_one() -> None:
    rig = LedgerRig(LedgerSettings(group_size=1))
    for _ in range(3):
        rig.ready()
    batches = [rig.lease(groups=1) for _ in range(3)]
    rig.at += 1e6
    events = [rig.expire() for _ in range(3)]
    assert [[event.batch for event in some if isinstance(event, ev.BatchReturned)] for some in events] == [
        [batch] for batch in batches
    ]
