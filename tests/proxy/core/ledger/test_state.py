"""The fold: whatever agents, trainers, clocks and crashes do, the ledger identity holds after every event and a replay
of the events, up to any of them, is what the live state was at that moment."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ajet_proxy.core.conversation.history import Lineage, Mark
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.gates import Gate
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import State
from ajet_sdk.errors import NotFound
from tests.kit.histories import everything, histories
from tests.kit.ledger_rig import SETTINGS, LedgerRig, Shelf, check, picture
from tests.kit.strategies import EVENT_KINDS, packed_call


class Unchanging:
    """Sees of every command that it changes nothing, whether it decides or refuses."""

    state: State
    presence = Presence()

    @classmethod
    def watch(cls, commands: Any) -> None:
        commands.__class__ = type(cls.__name__, (cls, type(commands)), {})

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def seen(*values: Any, **named: Any) -> Any:
            before = everything(self.state), deepcopy(vars(self.presence))
            try:
                return found(*values, **named)
            finally:
                assert (everything(self.state), vars(self.presence)) == before

        return seen


class Pictured(LedgerRig):
    """`pictures` are what can be seen after each event, which is checked, too."""

    def __init__(self) -> None:
        super().__init__(watch=True)
        self.pictures = list[str]()

    def run(self, events: Sequence[ev.Event]) -> Sequence[ev.Event]:
        for event in events:
            super().run((event,))
            self.pictures.append(picture(self.state))
        return events


def watched() -> Pictured:
    """A rig of which all is seen, and whose commands are seen to change nothing."""
    rig = Pictured()
    commands = rig.commands
    for part in (commands, commands.clients, commands.trainers, commands.leases, commands.judging):
        Unchanging.watch(part)
    return rig


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(least=25, begins=watched))
def test_whatever_happens_a_replay_is_what_the_state_was_at_each_moment(lived: Pictured) -> None:
    """Commands in any order. None changes anything; nor does any look at the state."""
    before = everything(lived.state)
    check(lived.state), picture(lived.state)
    assert everything(lived.state) == before
    replay = State(SETTINGS)
    for event, seen in zip(lived.events, lived.pictures, strict=True):
        replay.apply(event)
        assert picture(replay) == seen


def test_every_event_is_understood() -> None:
    assert set(State(SETTINGS)._listeners) == set(EVENT_KINDS)


def test_tokens_and_drift_are_counted_when_an_episode_seals(rig: LedgerRig) -> None:
    episode = rig.open(task="t")
    rig.call(episode, (1, 2), (3, 4))
    rig.call(episode, (1, 2, 3, 4, 5), (6,))
    rig.call(episode, (9,), (8,))
    assert rig.state.tallies.tokens == {"prompt": 0, "sampled": 0, "merged": 0, "generated": 4}
    rig.reward(episode)
    assert rig.state.tallies.tokens == {"prompt": 8, "sampled": 4, "merged": 4, "generated": 4}
    assert rig.state.tallies.drift == {"new_chain": 1}
    assert rig.state.tallies.drifts["m"].to_json() == {"turns": 2, "broken_by": {"new_chain": 1}, "rate": None}


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


def test_every_call_that_is_lost_is_counted_once_with_its_first_reason(rig: LedgerRig) -> None:
    episode = rig.open()
    (gone,) = rig.begin(episode, body="same")
    rig.lose(episode, gone)
    rig.begin(episode, body="same", retry=True)
    (late,) = rig.begin(episode, model="other")
    rig.restart()
    rig.finish(episode, late)
    assert rig.state.tallies.captures == {"disconnected": 1, "restarted": 2}
    (dead,) = rig.begin(episode)
    rig.abort(episode)
    rig.finish(episode, dead)
    assert rig.state.tallies.captures == {"disconnected": 1, "restarted": 2, "episode_discarded": 1}


def test_marks_count_while_their_episode_is_open() -> None:
    mark = Mark("what was said")
    rig = LedgerRig()
    for end in ("seal", "abort"):
        episode = rig.open()
        one, two, late, later = rig.begin(episode, choices=4)
        rig.run([ev.CallFinished(rig.at, episode, packed_call(one, [1], [2]), (mark,))])
        rig.run([ev.CallLost(rig.at, episode, two, "no_token_ids", (mark._replace(key="lost"),))])
        assert [len(known) for known in vars(rig.state.episodes.lineage)["_episodes"].values()] == [1, 1]
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


def test_the_gate_is_closing_while_calls_are_in_flight(rig: LedgerRig) -> None:
    episode = rig.open()
    assert not rig.state.gates.any().shut
    (call,) = rig.begin(episode)
    assert rig.state.gates.overall() == "open"
    rig.run([ev.GateClosed(5.0, "weights")])
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("closing", Gate(True, 5.0, "weights"))
    rig.finish(episode, call)
    assert rig.state.gates.overall() == "closed"
    rig.run([ev.GateClosed(9.0, "why")])
    assert rig.state.gates.any() == Gate(True, 5.0, "weights"), "closing a closed gate changes nothing"
    rig.run([ev.GateOpened(10.0, 1)])
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("open", Gate(False, 10.0, stood=5.0))
    rig.run([ev.GateOpened(11.0, 2)])
    assert rig.state.gates.any() == Gate(False, 10.0, stood=5.0), "nor does opening an open one"


def test_a_derived_task_takes_the_place_of_no_other(rig: LedgerRig) -> None:
    episode = rig.open(task="given")
    rig.run([ev.TaskNamed(rig.at, episode, "prompt-0")])
    assert rig.state.episodes[episode].opening.task == "given"
