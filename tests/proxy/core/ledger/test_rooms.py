"""What each room of the state makes of events that concern nothing that it knows."""

from __future__ import annotations

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.clients import Client
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_sdk.limits import MAX_TTL_S


def test_a_gate_that_opens_changes_the_version_of_no_other_model() -> None:
    state = State(LedgerSettings())
    state.apply(ev.PolicyAnnounced(1.0, "m", 4, ()))
    state.apply(ev.GateOpened(2.0, 9, "unknown"))
    assert {model: served.version for model, served in state.weights.served.items()} == {"m": 4}


def test_a_sign_of_life_is_forgotten_once_any_client_would_be_gone() -> None:
    def client(name: str) -> Client:
        return Client(name, name, "", 30.0, None, None, False, 0.0, 0.0)

    presence = Presence()
    presence.client_beats(client("old"), 10.0)
    presence.client_beats(client("new"), 10.0 + MAX_TTL_S)
    assert presence.client(client("old")) == 10.0
    presence.client_beats(client("new"), 11.0 + MAX_TTL_S)
    assert (presence.client(client("old")), presence.client(client("new"))) == (0.0, 11.0 + MAX_TTL_S)
