"""A snapshot is the state: whatever happened, whatever happens next, and whatever is shared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.batches import Batches
from ajet_proxy.core.ledger.holdouts import ENOUGH
from ajet_proxy.core.ledger.retries import repeats
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.ledger.tallies import Tallies
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.codec import decode, encode
from ajet_proxy.io.storage.journal import FRAME, MAGIC, JournalDamaged, segments, snapshots
from tests.kit.histories import everything, histories
from tests.kit.ledger_rig import SETTINGS, LedgerRig, check, picture
from tests.proxy.core.ledger.test_attempts import Story


def stored(tmp: Path, state: State, group_size: int = 2) -> State:
    (tmp / "journal").mkdir(exist_ok=True)
    for path in snapshots(tmp):
        path.unlink()
    snapshot.save(tmp, 1, state)
    return snapshot.load(tmp, dataclasses.replace(SETTINGS, group_size=group_size))


@settings(max_examples=40, deadline=None)
@given(histories(least=20), st.data())
def test_a_snapshot_anywhere_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, rig: LedgerRig, data: Any
) -> None:
    """The state comes back whole, and lives on as the one that was never written."""
    cut = data.draw(st.integers(0, len(rig.events)))
    live = State(SETTINGS)
    for event in rig.events[:cut]:
        live.apply(event)
    loaded = stored(tmp_path_factory.mktemp("data"), live)
    assert everything(loaded) == everything(live)
    for event in rig.events[cut:]:
        loaded.apply(event)
        live.apply(event)
        assert picture(loaded) == picture(live)
    assert everything(loaded) == everything(live)


@pytest.mark.parametrize("seed", range(20))
def test_what_the_world_failed_of_attempts_is_kept(seed: int) -> None:
    """By a snapshot, and event by event by the journal."""
    story = Story(seed)
    steps = [story.begin] * 6 + [story.end] * 6 + [story.take_back, story.turn_away, story.restart]
    for _ in range(30):
        story.dice.choice(steps)()
    episode = story.rig.state.episodes["x"]
    assert snapshot.unpack(snapshot.pack(episode)).attempts == episode.attempts
    for event in story.rig.events:
        assert decode(encode(event)) == event


def test_users_traffic_is_kept(tmp_path: Path) -> None:
    """Everything that awaits a judgement, in its order, its parts, what is said of it, and what is withdrawn."""
    rig = LedgerRig(watch=True)
    for name, first in (("a", ""), ("a.2", "a"), ("b", ""), ("c", "")):
        rig.call(name, traffic="chat", first=first, identified_by="lineage")
        rig.at += 1
    for name in ("b", "a", "a.2"):
        rig.seal(name)
        rig.at += 1
    rig.feedback("a", value=1.0)
    rig.judge("a.2")
    rig.withdraw("c")
    state = stored(tmp_path, rig.state)
    assert picture(state) == picture(rig.state)
    assert [*state.episodes.awaiting] == ["b", "a"]
    check(state)


def test_what_awaits_a_judgement_keeps_its_order(tmp_path: Path) -> None:
    """One sealed before another comes behind it, if its last call ends later."""
    rig = LedgerRig(watch=True)
    for name in ("a", "b", "c"):
        rig.open(name, judged=True)
        rig.call(name)
    (call,) = rig.begin("a")
    for name in ("a", "c", "b"):
        rig.seal(name)
    rig.finish("a", call, (1, 2), (3,))
    state = stored(tmp_path, rig.state)
    assert [*state.episodes.awaiting] == [*rig.state.episodes.awaiting] == ["c", "b", "a"]
    assert picture(state) == picture(rig.state)


def test_what_held_out_chats_earned_is_added_up_after_it(tmp_path: Path) -> None:
    live = State(SETTINGS)
    for step, reward in enumerate([0.0, 1.0] * ENOUGH):
        live.tallies.holdouts.add("m", step // ENOUGH, reward)
    loaded = stored(tmp_path, live)
    for state in (live, loaded):
        for version in (1, 2):
            state.tallies.holdouts.add("m", version, -1.0)
        state.tallies.holdouts.serves("m", 2)
    assert everything(loaded) == everything(live)
    assert [span["episodes"] for span in loaded.tallies.holdouts.to_json()["m"]] == [ENOUGH, ENOUGH + 1, 1]


def test_what_calls_share_is_written_and_held_once(tmp_path: Path) -> None:
    rig = LedgerRig()
    episode = rig.open(task="t", metadata={"list": [1, {"a": None}], "text": "é"})
    history: tuple[int, ...] = tuple(range(2000))
    for turn in range(30):
        rig.call(episode, history, (turn,))
        history = (*history, turn, 7)
    loaded = stored(tmp_path, rig.state)
    assert (tmp_path / "journal/00000001.snapshot").stat().st_size < 21_000
    known = loaded.episodes[episode].transcript
    assert len(known.texts.texts) == 1
    assert {entry.text for entry in known.calls.values()} == {0}
    assert loaded.episodes[episode].opening.metadata == {"list": [1, {"a": None}], "text": "é"}
    rig.reward(episode)
    loaded = stored(tmp_path, rig.state)
    known = loaded.episodes[episode].transcript
    assert [turn for timeline in known.timelines for turn in timeline.turns] == known.turns()
    assert all(turn is known.calls[turn.call].turn for timeline in known.timelines for turn in timeline.turns)


def test_a_request_costs_the_same_for_each_of_its_choices(tmp_path: Path) -> None:
    """However many others it has, and however long are the names that it was asked with."""
    sizes = []
    for choices in (100, 200, 400):
        rig = LedgerRig()
        episode = rig.open()
        calls = rig.begin(episode, choices=choices, model="m" * 1000, agent="a" * 1000, body="b" * 64, key="k")
        for call in calls:
            rig.lose(episode, call, "engine_status_404")
        known = rig.state.episodes[episode]
        sizes.append((sum(map(len, snapshot.pack_state(rig.state))), len(snapshot.pack(known))))
        for entries in (known.transcript.calls, stored(tmp_path, rig.state).episodes[episode].transcript.calls):
            assert len({id(entry.asked) for entry in entries.values()}) == 1
    for first, second, third in zip(*sizes, strict=True):
        assert 0 < third - second <= 2.1 * (second - first) < 200 * 100


def test_requests_that_are_alike_stay_two(tmp_path: Path) -> None:
    rig = LedgerRig()
    episode = rig.open()
    one, two = rig.begin(episode, body="same", choices=2), rig.begin(episode, body="same", choices=3)
    known = stored(tmp_path, rig.state).episodes[episode]
    assert repeats(known.transcript, "same", None, 1) == ()
    for call in one:
        rig.lose(episode, call, "retried")
    known = stored(tmp_path, rig.state).episodes[episode]
    assert repeats(known.transcript, "same", None, 1) == two


def test_a_turn_that_a_merge_changed_is_kept_as_it_is(tmp_path: Path) -> None:
    rig = LedgerRig()
    name = rig.in_state("ready")
    (chain,) = rig.state.episodes[name].transcript.chains
    changed = dataclasses.replace(chain, turns=(structs.replace(chain.turns[0], start=1),))
    rig.state.episodes[name].transcript.chains = (changed,)
    assert stored(tmp_path, rig.state).episodes[name].transcript.chains == (changed,)


def test_groups_have_the_size_with_which_the_daemon_starts(tmp_path: Path) -> None:
    rig = LedgerRig()
    for _ in range(3):
        rig.ready()
    state = stored(tmp_path, rig.state, group_size=3)
    assert (state.seats.queues.group_size, state.seats.queues.complete, state.seats.queues.waiting) == (2, 1, 0)
    state.apply(ev.ProxyStarted(rig.at, "strict", 3))
    assert (state.seats.queues.group_size, state.seats.queues.complete, state.seats.queues.waiting) == (3, 1, 0)


def test_a_field_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that it lacks has its default, and one that it adds is left out."""
    rig = LedgerRig()
    rig.open("e")
    vars(rig.state.tallies)["novelty"], rig.state.batches.leases = 5, 7
    with monkeypatch.context() as patch:
        patch.setattr(Tallies, "KEPT", (*Tallies.KEPT, "novelty"))
        patch.setattr(Batches, "KEPT", ())
        (tmp_path / "journal").mkdir()
        snapshot.save(tmp_path, 1, rig.state)
    loaded = snapshot.load(tmp_path, SETTINGS)
    assert (list(loaded.episodes), loaded.batches.leases, "novelty" in vars(loaded.tallies)) == (["e"], 0, False)


def test_what_a_snapshot_cannot_hold_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot hold a object"):
        snapshot.pack(object())


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    rig = LedgerRig()
    rig.in_state("ready")
    rig.in_state("open")
    stored(tmp_path, rig.state)
    (path,) = snapshots(tmp_path)
    whole = path.read_bytes()
    for damaged in (*(whole[:size] for size in range(0, len(whole), 7)), whole + b"x", MAGIC, whole[:-1],
                    whole[: len(MAGIC)] + whole[len(MAGIC) + FRAME.size :]):
        path.write_bytes(damaged)
        with pytest.raises(JournalDamaged, match="damaged"):
            snapshot.load(tmp_path, SETTINGS)


def test_without_a_snapshot_there_is_an_empty_ledger(tmp_path: Path) -> None:
    assert snapshot.load(tmp_path, LedgerSettings()).episodes == {}
    assert segments(tmp_path) == snapshots(tmp_path) == []
