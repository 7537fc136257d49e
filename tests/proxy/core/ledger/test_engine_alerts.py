"""An alert for each engine that does not tell what it sampled, and for no other."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger.engine_alerts import TRUST, EngineAlerts
from ajet_proxy.core.trajectory import call
from ajet_sdk.untrainable import GIVES_LOGPROBS, GIVES_TOKEN_IDS, UNTRAINABLE, untrainable_in

CHAT = "http://engine:11434/v1/chat/completions"


def test_the_reasons_are_those_of_lost_calls() -> None:
    assert set(UNTRAINABLE) == {call.NO_TOKEN_IDS, call.NO_LOGPROBS, call.UNASKABLE, call.NO_CHAT_ROUTE}
    assert untrainable_in("disconnected, no_logprobs, no_token_ids") == "no_logprobs"
    assert untrainable_in("disconnected") is untrainable_in("") is untrainable_in(None) is None


@pytest.mark.parametrize("reason", UNTRAINABLE)
def test_an_engine_that_does_not_tell_is_named_with_the_remedy_until_it_tells(reason: str) -> None:
    alerts = {"another": "line"}
    telling = EngineAlerts(alerts)
    for _ in range(2):
        telling.lost(CHAT, reason)
        (line,) = alerts.keys() - {"another"}
        what, remedy = UNTRAINABLE[reason]
        assert alerts[line] == f"{CHAT} {what} ({reason}), so nothing that it samples can be trained: {remedy}"
    telling.whole(CHAT)
    assert alerts == {"another": "line"}


def test_each_reason_has_the_remedy_that_helps() -> None:
    """An engine does not say what is meant by `unaskable`."""
    alerts: dict[str, str] = {}
    said = {}
    for reason in UNTRAINABLE:
        EngineAlerts(alerts).lost(CHAT, reason)
        (line,) = alerts.values()
        said[reason] = [remedy for remedy in (GIVES_TOKEN_IDS, GIVES_LOGPROBS) if remedy in line]
    assert said == {
        "no_token_ids": [GIVES_TOKEN_IDS], "no_logprobs": [GIVES_LOGPROBS], "no_chat_route": [],
        "unaskable": [GIVES_TOKEN_IDS, GIVES_LOGPROBS],
    }  # fmt: skip


def test_single_calls_of_an_engine_that_tells_raise_nothing_and_a_row_of_them_does() -> None:
    alerts: dict[str, str] = {}
    telling = EngineAlerts(alerts)
    for _ in range(3):
        telling.whole(CHAT)
        for _ in range(TRUST):
            telling.lost(CHAT, call.NO_TOKEN_IDS)
        assert alerts == {}
    telling.lost(CHAT, call.NO_TOKEN_IDS)
    assert len(alerts) == 1


def test_each_route_of_each_engine_is_heard_for_itself_and_engines_that_are_gone_are_not() -> None:
    alerts: dict[str, str] = {}
    telling = EngineAlerts(alerts)
    for engine in (CHAT, "http://engine:11434/v1/completions", "http://engine:1/v1/completions"):
        telling.lost(engine, call.NO_TOKEN_IDS)
    telling.whole("http://engine:11434/v1/completions")
    assert len(alerts) == 2
    telling.keep(["http://engine:1143", "http://engine:1"])
    (line,) = alerts.values()
    assert line.startswith("http://engine:1/v1/completions gives no token ids")
    telling.keep([])
    assert alerts == {}
