"""Episodes as they are found: in memory, in the archive, by a history, and by other parts of their chat."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from ajet_proxy.core.conversation.history import Lineage, Mark, Marks
from ajet_proxy.core.ledger import episodes, views
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.session_names import first_of
from ajet_sdk.errors import NotFound
from tests.kit.ledger_rig import LedgerRig, Shelf
from tests.kit.strategies import packed_call
from tests.kit.traffic_rig import TrafficRig


def test_archived_episodes_leave_the_state_and_are_still_found(rig: LedgerRig) -> None:
    old, new = rig.in_state("trained"), rig.in_state("recorded")
    before = views.record(rig.state, old, tokens="all")
    (batch,) = rig.state.batches
    rig.archive(kept=1)
    assert (old in rig.state.episodes, new in rig.state.episodes, rig.state.batches) == (False, True, {})
    assert views.record(rig.state, old, tokens="all") == before | {"stored": "archive"}
    assert views.status(rig.state)["archived"] == 1
    assert rig.state.batches.known(batch).state == "trained"
    rig.state.arrived([old], [batch])
    assert rig.state.episodes.find(old) is None
    with pytest.raises(NotFound):
        rig.state.batches.known(batch)
    assert [one["episode"] for one in views.records(rig.state, views.Wanted())["episodes"]] == [new]


def test_what_is_archived_is_read_from_the_archive() -> None:
    shelf = Shelf()
    rig = LedgerRig(archive=shelf)
    episode = rig.in_state("trained")
    (batch,) = rig.state.batches
    rig.archive()
    shelf.take(rig.state, 1)
    assert rig.state.episodes.leaving == rig.state.batches.leaving == {}
    assert rig.state.episodes.find(episode) is shelf.episodes[episode]
    assert rig.state.batches.known(batch) is shelf.batches[batch]
    assert rig.ack(batch) == ()


def test_marks_count_while_their_episode_is_open() -> None:
    mark = Mark("what was said")
    rig = LedgerRig()
    for end in ("seal", "abort"):
        episode = rig.open()
        one, two, late, later = rig.begin(episode, choices=4)
        rig.run([ev.CallFinished(rig.at, episode, packed_call(one, [1], [2]), (mark,))])
        rig.run([ev.CallLost(rig.at, episode, two, "no_token_ids", (mark._replace(key="lost"),))])
        for told in (mark, mark._replace(key="lost")):
            assert rig.state.episodes.lineage.continued(Marks([told])) == (episode,)
        rig.seal(episode) if end == "seal" else rig.abort(episode)
        rig.run([ev.CallFinished(rig.at, episode, packed_call(late, [1], [2]), (mark,))])
        rig.run([ev.CallLost(rig.at, episode, later, "no_token_ids", (mark,))])
        assert vars(rig.state.episodes.lineage) == vars(Lineage())


def test_an_attempt_that_nothing_names_is_known_again(rig: LedgerRig) -> None:
    episode = rig.open()
    for way in ("path", "lineage"):
        rig.run([ev.CallStarted(rig.at, episode, (way,), "m", "", way, f"body by {way}")])
        rig.lose(episode, way)
    assert rig.state.episodes.lineage.repeated("body by path", None, rig.state.episodes.all_lost) is None
    assert rig.state.episodes.lineage.repeated("body by lineage", None, rig.state.episodes.all_lost) == episode


def test_a_derived_task_takes_the_place_of_no_other(rig: LedgerRig) -> None:
    episode = rig.open(task="given")
    rig.run([ev.TaskNamed(rig.at, episode, "prompt-0")])
    assert rig.state.episodes[episode].opening.task == "given"


def test_a_chat_is_known_by_a_later_part_once_its_first_is_gone() -> None:
    """The archive is not read for it: each of its calls would wait for the disk."""
    rig = TrafficRig()
    rig.chat("a")
    rig.chat("a~2", first="a")
    rig.abort("a")
    assert rig.state.episodes.of_chat("a") is rig.state.episodes["a"]
    assert rig.state.episodes.of_chat("b") is None
    rig.archive()
    rig.state.arrived(["a"], [])  # and removed again
    rig.state.episodes.archive = archive = Mock()
    assert rig.state.episodes.of_chat("a") is rig.state.episodes["a~2"]
    assert archive.mock_calls == []


@pytest.mark.parametrize("end", ["seal", "abort"])
def test_a_history_may_go_on_from_chats_that_are_open_and_from_such_that_are_over(end: str) -> None:
    """The longest mark of any counts."""
    rig = TrafficRig()
    for name, mark in (("a.2", "hi"), ("b", "hi"), ("c", "hi, and more")):
        (call,) = rig.begin(name, traffic="chat", first="a" if name == "a.2" else "", identified_by="lineage")
        rig.finish(name, call, marks=(Mark(mark),))
    rig.seal("a.2") if end == "seal" else rig.abort("a.2")
    known = rig.state.episodes
    assert known.chats(Marks([Mark("hi")])) == ("b", "a")
    assert known.chats(Marks([Mark("hi, and more"), Mark("hi")])) == ("c",)
    assert known.chats(Marks([Mark("never said")])) == ()


@pytest.mark.parametrize(("withdrawn", "consents", "again"), [
    (False, True, True), (False, False, False), (True, False, True), (True, True, False), (False, None, True),
])  # fmt: skip
def test_a_request_repeats_one_of_which_nothing_came_if_it_consents_alike(
    withdrawn: bool, consents: bool | None, again: bool
) -> None:
    rig = TrafficRig(watch=False)
    (call,) = rig.begin("a", traffic="chat", identified_by="lineage", body="b", consents=not withdrawn)
    rig.lose("a", call)
    found = rig.state.episodes.continued(None, body_hash="b", retries=1, consents=consents)
    assert found == (("a",) if again else ())


def test_of_a_name_that_never_ends_the_latest_parts_are_known_by_their_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episodes, "MOST_SEALED", 2)
    rig = TrafficRig()
    for number in range(2, 6):
        (call,) = rig.begin(f"a.{number}", traffic="chat", first="a", identified_by="body")
        rig.finish(f"a.{number}", call, marks=(Mark(f"chat:{number}"),))
        rig.later(50)
    known = rig.state.episodes.cut_lineage
    ends = [known.continued(Marks([Mark(f"chat:{number}")])) for number in range(2, 6)]
    assert ends == [(), (), ("a.4",), ("a.5",)] and first_of("a.4") == first_of("a") == "a"


def test_the_name_that_was_withdrawn_last_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MOST_WITHDRAWN", 2)
    rig = TrafficRig()
    for name in ("a", "b"):
        rig.chat(name, withdraws=True)
    rig.chat("a~2", first="a", withdraws=True)
    rig.chat("c", withdraws=True)
    assert [*rig.state.episodes.refused] == ["a", "c"]


def test_parts_leave_with_their_archive() -> None:
    rig = TrafficRig()
    for name in ("a", "a.2", "a.3"):
        rig.chat(name, first="a" if name != "a" else "")
    rig.abort("a.2")
    rig.archive()
    assert rig.state.episodes.parts == {"a": ["a.3"]}
    rig.abort("a.3")
    rig.archive()
    assert rig.state.episodes.parts == {}
