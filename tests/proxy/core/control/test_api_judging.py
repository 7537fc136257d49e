"""The routes of judges and of feedback, as functions: whom they reach."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_sdk.errors import Forbidden, NotFound
from tests.kit.control_rig import Caller
from tests.kit.refused import refused

APP, OTHER = Claims("agent", "app"), Claims("agent", "other")


@pytest.fixture
def caller() -> Caller:
    caller = Caller()
    caller.rig.call("a", traffic="chat", tenant="app")
    return caller


def call_of(caller: Caller) -> str:
    return next(iter(caller.rig.state.episodes["a"].transcript.calls))


def test_feedback_names_an_answer_a_call_or_an_episode(caller: Caller) -> None:
    call = call_of(caller)
    for body in ({"response": f"answer-{call}"}, {"call": call}, {"call": call, "episode": "a"}):
        assert caller.post("/feedback", body | {"value": 1}, claims=APP) == {
            "episode": "a", "state": "open", "call": call,
        }
    assert caller.post("/feedback", {"episode": "a", "text": "t"}, claims=APP) == {"episode": "a", "state": "open"}
    assert [*caller.rig.state.episodes["a"].feedback] == [call, ""]


def test_feedback_reaches_the_callers_own(caller: Caller) -> None:
    call = call_of(caller)
    for body in ({"response": f"answer-{call}"}, {"call": call}, {"call": "none"}, {"call": call, "episode": "b"}):
        claims = APP if body.get("episode") else OTHER
        with refused(NotFound):
            caller.post("/feedback", body | {"value": 1}, claims=claims)
    with refused(Forbidden, "foreign_episode"):
        caller.post("/feedback", {"episode": "a", "value": 1}, claims=OTHER)


def test_a_judge_judges_in_its_lanes(caller: Caller) -> None:
    caller.rig.seal("a")
    body: Any = {"judge": "j", "rewards": [{"value": 1}]}
    with refused(Forbidden, "foreign_lane"):
        caller.post("/episodes/a/judgement", body, claims=Claims("judge", lanes=("other",)))
    shown = caller.post("/episodes/a/judgement", body, claims=Claims("judge", lanes=("chat",)))
    assert shown["reward"] == 1
    assert caller.ask("GET", "/status")["traffic"]["judged"] == 1
