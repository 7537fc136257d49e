"""The fold: whatever agents, trainers, clocks and crashes do, the ledger identity holds after every event and a replay
of the events, up to any of them, is what the live state was at that moment."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, given, settings

from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import State
from tests.kit.histories import everything, histories
from tests.kit.ledger_rig import SETTINGS, LedgerRig, check, picture
from tests.kit.strategies import EVENT_KINDS


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

    def run(self, events: Sequence[Event]) -> Sequence[Event]:
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
    assert set(State(SETTINGS).listeners) == set(EVENT_KINDS)
