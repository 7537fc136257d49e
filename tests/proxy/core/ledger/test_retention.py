"""Rules for what leaves memory and the archive, when the journal is compacted, and what a full disk keeps out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import retention, views
from ajet_proxy.core.ledger.retention import closed_to, is_due, to_archive, to_remove
from ajet_sdk.errors import Conflict
from tests.kit.ledger_rig import LedgerRig


def archived(rig: LedgerRig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    events = to_archive(rig.state, rig.at)
    if not events:
        return (), ()
    (event,) = events
    assert isinstance(event, ev.EpisodesArchived)
    return event.episodes, event.batches


def test_only_what_ended_and_is_not_among_the_latest_leaves(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [rig.in_state(state) for state in ("trained", "recorded", "discarded")]
    for state in ("open", "sealed", "leased", "ready"):
        rig.in_state(state)
    assert archived(rig) == ((), ())
    monkeypatch.setattr(retention, "KEPT_EPISODES", 2)
    assert archived(rig)[0] == (ended[0],)
    monkeypatch.setattr(retention, "KEPT_EPISODES", 0)
    assert archived(rig)[0] == tuple(ended)
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    assert archived(rig)[0] == tuple(ended[:2])


def test_the_more_episodes_wait_the_more_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 1)
    monkeypatch.setattr(retention, "KEPT_EPISODES", 0)
    rig = LedgerRig()
    for _ in range(30):
        rig.in_state("recorded")
    left = []
    while leaving := len(archived(rig)[0]):
        rig.archive()
        left.append(leaving)
    assert left == [3, 2, 2, 2, 2, *[1] * 19]


def test_long_episodes_leave_sooner(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [rig.in_state("trained") for _ in range(4)]
    size = next(iter(rig.state.episodes.finished.values()))
    assert size == 3 * 4 + 8
    monkeypatch.setattr(retention, "KEPT_BYTES", 2 * size)
    assert archived(rig)[0] == tuple(ended[:2])


def test_what_is_older_than_retention_allows_leaves_however_few_there_are(rig: LedgerRig) -> None:
    old, batch = rig.in_state("trained"), next(iter(rig.state.batches))
    rig.in_state("ready")
    rig.at += 10
    new = rig.in_state("recorded")
    assert to_archive(rig.state, rig.at, 10.0) == to_archive(rig.state, rig.at + 1e9) == ()
    assert to_archive(rig.state, rig.at + 1, 10.0) == (ev.EpisodesArchived(rig.at + 1, (old,), (batch,)),)
    assert to_archive(rig.state, rig.at + 11, 10.0) == (ev.EpisodesArchived(rig.at + 11, (old, new), (batch,)),)


def test_an_episode_with_a_call_in_flight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEPT_EPISODES", 0)
    rig = LedgerRig()
    episode = rig.open()
    (call,) = rig.begin(episode)
    rig.abort(episode)
    assert archived(rig) == ((), ())
    rig.lose(episode, call)
    assert archived(rig)[0] == (episode,)


def test_a_batch_leaves_with_the_last_of_its_episodes(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        rig.ready()
    first, other = rig.lease(group_size=2), rig.in_state("leased")
    assert first is not None
    rig.ack(first)
    monkeypatch.setattr(retention, "AT_ONCE", 1)
    gone = [event.batches for _ in range(2) for event in rig.archive() if isinstance(event, ev.EpisodesArchived)]
    assert gone == [(), (first,)]
    assert rig.archive() == ()
    assert rig.state_of(other) == "leased"


def test_what_is_archived_takes_nothing_more_and_repetitions_are_answered_as_done(rig: LedgerRig) -> None:
    trained, recorded = rig.in_state("trained"), rig.in_state("recorded")
    (batch,) = rig.state.batches
    episode = rig.open()
    (call,) = rig.begin(episode, key="k")
    rig.begin(episode, key="k")
    rig.abort(episode)
    rig.restart()
    rig.archive()
    assert rig.ack(batch) == rig.seal(trained) == rig.reward(trained, id="given") == rig.abort(episode) == ()
    assert rig.finish(episode, call) == ()
    mark = (ev.Mark("what was said"),)
    assert rig.commands.lose_call(episode, call, "disconnected", at=rig.at, marks=mark) == ()
    for refused in (
        lambda: rig.reward(recorded, 0.5), lambda: rig.reward(trained, 0.5), lambda: rig.call(trained),
        lambda: rig.open(trained), lambda: rig.nack(batch), lambda: rig.extend(batch), lambda: rig.abort(trained),
    ):
        with pytest.raises(Conflict):
            refused()


def test_a_returned_batch_whose_episodes_were_trained_elsewhere_is_refused_for_good(rig: LedgerRig) -> None:
    rig.ready()
    first = rig.batch(group_size=1)
    rig.nack(first)
    second = rig.batch(group_size=1)
    rig.ack(second)
    rig.archive()
    assert set(rig.state.batches.leaving) == {first, second}
    with pytest.raises(Conflict, match="went elsewhere"):
        rig.ack(first)
    assert rig.ack(second) == ()


def test_what_a_lease_delivered_does_not_change_with_a_later_reward(rig: LedgerRig) -> None:
    episode = rig.ready()
    first = rig.batch(group_size=1)
    delivered = views.batch(rig.state, first).groups
    rig.nack(first)
    rig.reward(episode, 0.25)
    second = rig.batch(group_size=1)
    rig.ack(second)
    for _ in range(2):
        assert views.batch(rig.state, first).groups == delivered
        assert views.batch(rig.state, second).groups[0].episodes[0].reward == 0.25
        rig.archive()


@given(st.integers(0, 100), st.integers(0, 100))
def test_compaction_is_due_when_the_journal_has_outgrown_the_snapshot(sealed: int, snapshot: int) -> None:
    assert is_due(sealed, snapshot) == (sealed > 0 and sealed >= snapshot)


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 40))
def test_the_oldest_are_removed_until_the_rest_fits(sizes: list[int], limit: int) -> None:
    rows = [(float(number), size) for number, size in enumerate(sizes)]
    gone = list(to_remove(rows, sum(sizes), limit))
    assert gone == list(range(len(gone)))
    assert sum(sizes[len(gone) :]) <= limit
    assert not gone or sum(sizes[len(gone) - 1 :]) > limit


@pytest.mark.parametrize(
    ("used", "limit", "closed"),
    [(10**9, 0, ()), (89, 100, ()), (90, 100, (ev.EpisodeOpened,)), (100, 100, (ev.EpisodeOpened, ev.CallStarted))],
)
def test_new_episodes_are_kept_out_before_new_calls(used: int, limit: int, closed: tuple[type, ...]) -> None:
    assert closed_to(used, limit) == closed
