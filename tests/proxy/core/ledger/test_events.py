"""The vocabulary is complete, frozen and plain."""

from __future__ import annotations

import inspect

import pytest
from msgspec.structs import fields

from ajet_proxy.core.ledger import events
from tests.kit.strategies import EVENT_KINDS


def test_every_record_is_an_event() -> None:
    records = {kind for _, kind in inspect.getmembers(events, inspect.isclass) if kind.__module__ == events.__name__}
    assert records == {events.Event, events.EpisodeEvent, *EVENT_KINDS}


@pytest.mark.parametrize("kind", EVENT_KINDS, ids=lambda kind: kind.__name__)
def test_every_event_has_a_time_and_cannot_change(kind: type) -> None:
    names = [field.name for field in fields(kind)]
    assert names[0] == "at"
    blank = kind(**dict.fromkeys(names))
    with pytest.raises(AttributeError, match="immutable"):
        blank.at = 1.0
    assert not hasattr(blank, "__dict__")
