"""Users' traffic and what awaits a judgement: its life, its judge, what users say, and what is withdrawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings

from ajet_proxy.core.conversation.history import Mark, Marks
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import judging, tallies
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.judging import MOST_AGE_S, MOST_CALLS, MOST_WAIT_S, SILENCE_S, answers
from ajet_proxy.core.ledger.session_names import first_of
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.tokens import unpack_tokens
from ajet_sdk.errors import AjetError
from ajet_sdk.routes import Judgement, LeaseJudgements
from tests.kit.histories import everything, histories
from tests.kit.ledger_rig import SETTINGS, LedgerRig, check
from tests.kit.refused import refused

TRAFFIC = replace(SETTINGS, traffic_holdout=0.0, traffic_idle=50.0, traffic_backlog=3)


@pytest.fixture
def rig() -> LedgerRig:
    return LedgerRig(TRAFFIC, watch=True)


def chat(rig: LedgerRig, name: str, **options: Any) -> str:
    """A whole call of a user, whose chat is called `name`."""
    return rig.call(name, traffic="chat", **options)


def awaiting(rig: LedgerRig, name: str = "a", **options: Any) -> str:
    """The call of a chat that has been silent for so long that it awaits a judgement."""
    call = chat(rig, name, **options)
    rig.later(50)
    assert name in rig.state.episodes.awaiting
    return call


def state(rig: LedgerRig, name: str = "a") -> tuple[str, str | None]:
    known = rig.state.episodes[name]
    return known.state, known.reason


def waiting(rig: LedgerRig, lanes: tuple[str, ...] | None = None, **body: Any) -> list[list[str]]:
    found = rig.commands.judging.waiting(LeaseJudgements(**body), lanes, rig.at)
    return [[one.id for one in group] for group in found]


# ---- its life


def test_a_chat_that_named_no_model_awaits_a_judgement_of_who_answered() -> None:
    """No model is announced yet."""
    rig = LedgerRig(TRAFFIC)
    awaiting(rig, model="")
    assert waiting(rig, model="m") == [["a"]]


def test_a_silent_chat_is_sealed_and_awaits_a_judgement_that_makes_it_ready(rig: LedgerRig) -> None:
    call = awaiting(rig)
    assert state(rig) == ("sealed", None)
    assert rig.lease(group_size=1) is None
    rig.judge("a", 0.5, call=call, note="fine")
    assert state(rig) == ("ready", None)
    known = rig.state.episodes["a"]
    assert [(one.id, one.value, one.call, one.note) for one in known.rewards.values()] == [
        (f"judge-{call}", 0.5, call, "fine")
    ]
    assert known.group_key.lane == "chat"
    assert rig.lease(group_size=1) is not None


def test_scores_of_an_agent_and_of_the_episode_have_names_of_their_own(rig: LedgerRig) -> None:
    awaiting(rig, agent="x")
    scores = ({"value": 1.0}, {"value": -1.0, "agent": "x"})
    rig.run(rig.commands.judging.judge("a", Judgement("j", scores), at=rig.at))
    assert [*rig.state.episodes["a"].rewards] == ["judge", "judge@x"]


def test_an_app_that_rewards_needs_no_judge(rig: LedgerRig) -> None:
    chat(rig, "a")
    rig.reward("a")
    assert state(rig) == ("ready", None)
    awaiting(rig, "b")
    rig.reward("b", final=False)
    assert state(rig, "b") == ("ready", None)
    with refused(AjetError, "episode_ready"):
        rig.judge("b")
    assert rig.commands.judging.status(rig.at)["rewarded"] == 2


def test_of_a_holdout_it_is_recorded(rig: LedgerRig) -> None:
    rig = LedgerRig(replace(TRAFFIC, traffic_holdout=1.0), watch=True)
    awaiting(rig)
    rig.judge("a")
    assert state(rig) == ("recorded", None)
    assert rig.state.episodes["a"].opening.evaluation is None


def test_what_is_not_of_the_sample_is_not_judged(rig: LedgerRig) -> None:
    rig = LedgerRig(replace(TRAFFIC, traffic_sample=0.0), watch=True)
    chat(rig, "a")
    rig.later(50)
    assert state(rig) == ("discarded", "no_reward")
    assert rig.commands.judging.status(rig.at)["sealed"] == 0


def test_shares_go_by_the_name_of_the_first_part(rig: LedgerRig) -> None:
    rig = LedgerRig(replace(TRAFFIC, traffic_holdout=0.5, traffic_sample=0.5), watch=True)
    kinds = set()
    for number in range(32):
        chat(rig, f"chat{number}")
        chat(rig, f"chat{number}.2", first=f"chat{number}")
        one, two = (rig.state.episodes[f"chat{number}{part}"].opening for part in ("", ".2"))
        assert (one.judged, one.eval) == (two.judged, two.eval)
        kinds.add((one.judged, one.eval))
    assert len(kinds) == 4


@pytest.mark.parametrize("way", ["harness", "body", "lineage"])
def test_under_a_name_that_outlives_it_a_long_chat_is_sealed(rig: LedgerRig, way: str) -> None:
    for _ in range(MOST_CALLS):
        chat(rig, "a", identified_by=way)
    chat(rig, "b", identified_by="path")
    chat(rig, "c", identified_by=way)
    rig.tick()
    assert [*rig.state.episodes.awaiting] == ["a"]
    while rig.at < 1000 + MOST_AGE_S:
        rig.at += 40
        rig.heartbeat("b")
        if rig.state.episodes["c"].state == "open":
            rig.heartbeat("c")
        if rig.at < 1900:
            assert state(rig, "b") == ("open", None)
        rig.tick()
    assert state(rig, "b") == ("sealed", None)  # by its wall timeout
    assert state(rig, "c") == ("sealed", None)


def test_a_chat_with_a_call_in_flight_awaits_once_that_has_ended(rig: LedgerRig) -> None:
    for _ in range(MOST_CALLS):
        chat(rig, "a", identified_by="body")
    (late,) = rig.begin("a")
    rig.tick()
    assert state(rig) == ("sealed", None)
    assert not rig.state.episodes.awaiting
    rig.finish("a", late)
    assert [*rig.state.episodes.awaiting] == ["a"]


def test_nothing_whole_awaits_nothing(rig: LedgerRig) -> None:
    (call,) = rig.begin("a", traffic="chat")
    rig.lose("a", call)
    rig.later(50)
    assert state(rig)[0] == "discarded"
    assert rig.commands.judging.status(rig.at)["lost"] == 1


def test_a_call_that_is_taken_back_may_leave_nothing_to_judge(rig: LedgerRig) -> None:
    call = awaiting(rig)
    rig.lose("a", call, taken_back=True)
    assert state(rig)[0] == "discarded"


def test_what_nobody_judges_in_a_day_is_discarded(rig: LedgerRig) -> None:
    awaiting(rig)
    rig.later(MOST_WAIT_S - 1)
    assert state(rig) == ("sealed", None)
    rig.later(1)
    assert state(rig) == ("discarded", "not_judged")


def test_while_the_daemon_is_away_nobody_waits(rig: LedgerRig) -> None:
    awaiting(rig)
    rig.at += 3 * MOST_WAIT_S
    rig.restart()
    rig.tick()
    assert state(rig) == ("sealed", None)
    rig.later(MOST_WAIT_S)
    assert state(rig) == ("discarded", "not_judged")


def test_the_oldest_make_room_for_what_comes(rig: LedgerRig) -> None:
    for number in range(5):
        awaiting(rig, f"chat{number}")
        assert len(rig.state.episodes.awaiting) <= 3
    assert [*rig.state.episodes.awaiting] == ["chat2", "chat3", "chat4"]
    rig.run(rig.commands.expire(rig.at, tight=True))
    assert not rig.state.episodes.awaiting
    status = rig.commands.judging.status(rig.at)
    assert (status["sealed"], status["not_judged"]) == (5, 5)


def test_tight_memory_discards_more_at_once_than_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "AT_ONCE", 2)
    monkeypatch.setattr(judging, "ROOM", 3)
    rig = LedgerRig(replace(TRAFFIC, traffic_backlog=5))
    for number in range(5):
        awaiting(rig, f"chat{number}")
    rig.run(rig.commands.expire(rig.at, tight=True))
    assert [*rig.state.episodes.awaiting] == ["chat3", "chat4"]


def test_the_cap_holds_whatever_seals_and_counts_what_is_to_be_judged_alone(rig: LedgerRig) -> None:
    """Many at once, too, of which some await nothing."""
    for number in range(3):
        awaiting(rig, f"chat{number}")
    for number in range(3, 8):
        chat(rig, f"chat{number}")
        rig.call(f"plain{number}", traffic="chat", judged=False)
    rig.later(50)
    assert [*rig.state.episodes.awaiting] == ["chat5", "chat6", "chat7"]
    chat(rig, "chat8")
    rig.seal("chat8")
    assert [*rig.state.episodes.awaiting] == ["chat6", "chat7", "chat8"]
    for number in range(9, 14):
        rig.call(f"plain{number}", traffic="chat", judged=False)
    rig.later(50)
    assert [*rig.state.episodes.awaiting] == ["chat6", "chat7", "chat8"], "what is not judged needs no room"
    assert rig.commands.judging.status(rig.at)["sealed"] == 9


def test_ordinary_groups_can_be_judged_too(rig: LedgerRig) -> None:
    for name in ("a", "b", "c"):
        rig.open(name, task="t", judged=True)
        rig.call(name)
    for name in ("a", "b"):
        rig.seal(name)
        assert waiting(rig, unit="groups") == []
    rig.seal("c")
    rig.later(9)
    assert waiting(rig, unit="groups") == [], "its next episode may begin"
    rig.later(1)
    assert waiting(rig, unit="groups") == [["a", "b", "c"]]
    for value, name in enumerate(("a", "b", "c")):
        rig.judge(name, value / 2)
    assert rig.lease(group_size=3) is not None
    rig.open("d", judged=True)
    rig.later(200)
    assert state(rig, "d") == ("discarded", "idle_timeout")


def test_another_run_of_the_model_takes_what_awaits_too(rig: LedgerRig) -> None:
    rig.announce(run="a")
    awaiting(rig)
    rig.announce(version=0, run="b")
    assert state(rig) == ("discarded", "other_run")


# ---- its judge


def test_a_judgement_counts_once(rig: LedgerRig) -> None:
    call = awaiting(rig)
    rig.judge("a", 1.0, "one", call=call)
    assert rig.judge("a", 1.0, "one", call=call) == ()
    with refused(AjetError, "already_judged"):
        rig.judge("a", 1.0, "two", call=call)
    with refused(AjetError, "already_judged"):
        rig.judge("a", 0.5, "one", call=call)
    assert rig.state.episodes["a"].reward() == 1.0
    rig.ack(rig.batch(group_size=1))
    assert rig.judge("a", 1.0, "one", call=call) == ()


def test_a_judgement_counts_though_there_is_no_room_for_its_notes(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.episode.MAX_NOTES", 10)
    call = awaiting(rig)
    body = Judgement("j", ({"value": 1.0, "call": call, "note": "x" * 8}, {"value": 0.5, "note": "y" * 8}))
    rig.run(rig.commands.judging.judge("a", body, at=rig.at))
    assert [one.note for one in rig.state.episodes["a"].rewards.values()] == ["(cut)", "x" * 8]
    assert rig.commands.judging.judge("a", body, at=rig.at) == ()


@pytest.mark.parametrize("order", [1, -1])
def test_a_judgement_counts_whole_in_whatever_order_it_is_told(rig: LedgerRig, order: int) -> None:
    rig = LedgerRig(replace(TRAFFIC, traffic_holdout=1.0), watch=True)
    call = awaiting(rig, agent="x")
    scores = ({"value": 1.0, "call": call}, {"value": 0.25, "agent": "x"}, {"value": 0.5})
    rig.run(rig.commands.judging.judge("a", Judgement("j", scores[::order]), at=rig.at))
    assert rig.state.episodes["a"].reward() == 1.75
    assert rig.commands.judging.status(rig.at)["holdout"]["m"][0]["mean"] == pytest.approx(1.75 / 3)


def test_a_chat_that_is_over_and_holds_up_a_group_ends_in_one_step(rig: LedgerRig) -> None:
    """As after a laptop's sleep: both have become true at once."""
    rig = LedgerRig(replace(TRAFFIC, traffic_idle=900.0), watch=True)
    rig.lease(group_size=2)
    for name in ("one", "two"):
        chat(rig, name, task="t")
        rig.at += 5
        if name == "one":
            rig.reward("one")
    rig.withdraw("two")
    rig.later(1000)
    assert state(rig, "two") == ("discarded", "withdrawn")


def test_a_user_who_is_still_answered_ends_no_chat(rig: LedgerRig) -> None:
    """Not even at the age at which every other episode is."""
    rig.begin("a", traffic="chat")
    for _ in range(3):
        rig.later(SETTINGS.wall_timeout)
        assert state(rig) == ("sealed", None)


def test_a_clock_that_is_set_back_moves_what_awaits_with_it(rig: LedgerRig) -> None:
    rig.at = 1e9
    awaiting(rig, "old")
    awaiting(rig, "judged")
    rig.judge("judged")
    rig.begin("runs", traffic="chat")
    rig.seal("runs")
    rig.at = 1e6
    rig.restart()
    assert rig.commands.judging.status(rig.at)["oldest_s"] <= 100
    rig.at += SILENCE_S
    assert rig.commands.judging.alerts(rig.at)
    awaiting(rig, "new")
    rig.state.derive()
    assert [*rig.state.episodes.awaiting] == ["old", "new"]
    assert rig.state.episodes["runs"].sealed_at == 1e6
    rig.later(MOST_WAIT_S)
    assert not rig.state.episodes.awaiting


def test_what_follows_from_the_parts_of_a_chat_is_made_anew_as_it_was(rig: LedgerRig) -> None:
    chat(rig, "a")
    chat(rig, "a~2", first="a")
    for _ in range(2):
        rig.state.derive()
        assert rig.state.episodes.parts == {"a": ["a~2"]}


def test_a_recorded_chat_that_is_rewarded_later_counts_as_rewarded(rig: LedgerRig) -> None:
    rig = LedgerRig(replace(TRAFFIC, traffic_holdout=1.0), watch=True)
    (call,) = rig.begin("a", traffic="chat")
    rig.lose("a", call)
    rig.seal("a")
    rig.reward("a")
    status = rig.commands.judging.status(rig.at)
    assert (status["sealed"], status["rewarded"], status["lost"]) == (1, 1, 0)


def test_no_score_is_no_judgement(rig: LedgerRig) -> None:
    awaiting(rig)
    rig.judge("a", None)
    assert state(rig) == ("discarded", "not_judged")
    assert rig.judge("a", None) == ()
    with refused(AjetError, "episode_discarded"):
        rig.judge("a", 1.0)


@pytest.mark.parametrize("name", ["open", "plain", "unknown"])
def test_what_awaits_nothing_takes_no_judgement(rig: LedgerRig, name: str) -> None:
    chat(rig, "open")
    rig.ready("t")
    with pytest.raises(AjetError):
        rig.judge("plain" if name == "plain" else name)


def test_what_judges_use_is_counted_by_name_and_day(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of a judgement. What is refused or said again is not counted."""

    def judged(name: str, judge: str, **body: Any) -> None:
        body = {"rewards": ({"value": 1.0},), "tokens": 10} | body
        rig.run(rig.commands.judging.judge(name, Judgement(judge, **body), at=rig.at))

    def tokens() -> Any:
        return rig.commands.judging.status(rig.at)["tokens_today"]

    for name in ("a", "b", "c"):
        awaiting(rig, name)
    judged("a", "one")
    judged("a", "one")
    with refused(AjetError, "already_judged"):
        judged("a", "two")
    judged("b", "one", rewards=(), tokens=5)
    judged("c", "two", withdraw=True)
    assert tokens() == {"one": 15, "two": 10}
    rig.at += 86400
    assert tokens() == {}
    monkeypatch.setattr(tallies, "MOST_JUDGES", 1)
    for name in ("d", "e"):
        awaiting(rig, name)
        judged(name, name)
    assert tokens() == {"e": 10}


def test_a_score_of_no_call_is_refused(rig: LedgerRig) -> None:
    awaiting(rig)
    with refused(AjetError, "unknown_call"):
        rig.judge("a", 1.0, call="other")
    assert state(rig) == ("sealed", None)


def test_one_judge_at_a_time_until_its_lease_lapses(rig: LedgerRig) -> None:
    awaiting(rig)
    ((one,),) = rig.commands.judging.waiting(LeaseJudgements(), None, rig.at)
    assert rig.commands.judging.is_free(one.id, rig.at)
    rig.presence.judge([one.id], rig.at + 10, rig.state.episodes.awaiting)
    assert not rig.commands.judging.is_free(one.id, rig.at)
    assert waiting(rig) == []
    assert rig.commands.judging.status(rig.at)["leased"] == 1
    rig.at += 10
    assert waiting(rig) == [["a"]]
    rig.presence.judge([one.id], rig.at + 10, rig.state.episodes.awaiting)
    rig.presence.give_back([one.id])
    assert waiting(rig) == [["a"]]
    rig.presence.judge([one.id], rig.at + 10, rig.state.episodes.awaiting)
    rig.judge("a")
    assert not rig.commands.judging.is_free(one.id, rig.at + 10)
    rig.presence.judge([], rig.at, rig.state.episodes.awaiting)
    assert not rig.presence.judged


def test_what_is_judged_first_is_found_without_a_look_at_the_others(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        awaiting(rig, name)
    looks, plain = list[str](), Episode.trains

    def trains(one: Episode) -> list[str]:
        looks.append(one.id)
        return plain(one)

    monkeypatch.setattr(Episode, "trains", trains)
    ((first,), *_) = [next(rig.commands.judging.waiting(LeaseJudgements(model="m"), None, rig.at))]
    assert (first.id, looks) == ("c", ["c"])


def test_feedback_comes_first_and_then_the_newest(rig: LedgerRig) -> None:
    for name in ("a", "b", "c"):
        awaiting(rig, name)
    rig.feedback("a", value=1.0)
    assert waiting(rig) == [["a"], ["c"], ["b"]]
    assert waiting(rig, ("other",)) == waiting(rig, lane="other") == waiting(rig, model="n") == []
    assert waiting(rig, ("chat",), lane="chat", model="m") == [["a"], ["c"], ["b"]]


def test_a_judge_sees_what_came_before_and_after_each_answer(rig: LedgerRig) -> None:
    first = chat(rig, "a", prompt=(1, 2), sampled=(3,))
    rig.at += 1
    again = chat(rig, "a", prompt=(1, 2, 3, 4), sampled=(5,))
    rig.at += 1
    last = chat(rig, "a", prompt=(1, 2, 3, 4), sampled=(6,))
    judge = rig.call("a", (9,), (9,), model="other")
    seen = answers(rig.state.episodes["a"], "strict")()
    assert [(one.call, one.kind, *map(unpack_tokens, (one.before, one.answer, one.next))) for one in seen] == [
        (first, "reply", (1, 2), (3,), (4,)), (again, "again", (1, 2, 3, 4), (5,), ()),
        (last, "none", (1, 2, 3, 4), (6,), ()),
    ]
    assert judge not in [one.call for one in seen]


def test_a_judge_sees_the_last_tokens_of_a_long_prompt(rig: LedgerRig) -> None:
    chat(rig, "a", prompt=tuple(range(judging.BEFORE + 5)))
    assert unpack_tokens(answers(rig.state.episodes["a"], "strict")()[0].before) == tuple(range(5, judging.BEFORE + 5))


# ---- whatever happens


@settings(max_examples=60)
@given(histories(least=25))
def test_what_holds_of_traffic_in_every_history(lived: LedgerRig) -> None:
    """Counts add up after each event: what was sealed is one of the others. An episode is judged once. What is
    withdrawn is in no batch that is leased later. A replay is the live state."""
    replay, judged = State(lived.state.settings), set[str]()
    for event in lived.events:
        if isinstance(event, ev.BatchLeased):
            assert not [name for _, names in event.groups for name in names if replay.episodes[name].withdrawn]
        if isinstance(event, ev.EpisodeJudged):
            assert event.episode not in judged and event.episode in replay.episodes.awaiting
            judged.add(event.episode)
        replay.apply(event)
        assert replay.tallies.judging["sealed"] == sum(replay.tallies.judging[name] for name in judging.COUNTED[1:])
        assert replay.tallies.judging["awaiting"] >= len(replay.episodes.awaiting)
    check(replay)
    assert everything(replay) == everything(lived.state)
    lived.tick()
    assert len(lived.state.episodes.awaiting) <= lived.state.settings.traffic_backlog


# ---- what users say


def test_feedback_is_evidence_and_the_latest_counts(rig: LedgerRig) -> None:
    call = chat(rig, "a")
    rig.feedback("a", call, value=1.0)
    assert rig.feedback("a", call, value=1.0) == ()
    rig.feedback("a", call, value=-1.0, text="no")
    rig.feedback("a", better="this")
    assert state(rig) == ("open", None)
    assert rig.state.episodes["a"].reward() is None
    assert [said.to_json() for said in rig.state.episodes["a"].feedback.values()] == [
        {"at": rig.at, "call": call, "value": -1.0, "text": "no"}, {"at": rig.at, "better": "this"},
    ]
    rig.reward("a")
    rig.batch(group_size=1)
    rig.feedback("a", call, value=0.0)
    assert rig.state.episodes["a"].feedback[call].value == 0.0


def test_feedback_on_what_is_archived_is_refused(rig: LedgerRig) -> None:
    chat(rig, "a")
    rig.abort("a")
    rig.archive()
    with refused(AjetError, "episode_archived"):
        rig.feedback("a", value=1.0)


# ---- what is withdrawn


def test_a_header_of_any_call_takes_all_parts_out(rig: LedgerRig) -> None:
    for name in ("a", "a.2", "a.3", "a.4"):
        awaiting(rig, name, first="a" if name != "a" else "")
    rig.judge("a.2")
    rig.judge("a.3")
    chat(rig, "a.5", first="a")
    leased = rig.batch(group_size=1)
    (name,) = rig.state.batches[leased].episodes()
    chat(rig, "a.5", withdraws=True)
    states = {one.id: (one.state, one.reason) for one in rig.state.episodes.values()}
    gone = ("discarded", "withdrawn")
    assert states.pop(name) == ("leased", None)
    assert states.pop("a.5") == ("open", None)  # its user is answered
    assert states.pop("a")[0] == states["a.4"][0] == "discarded"
    assert states.pop("a.4") == gone
    assert set(states.values()) == {gone}
    rig.nack(leased)
    assert state(rig, name) == gone
    rig.later(50)
    assert state(rig, "a.5") == gone
    chat(rig, "a.6", first="a")
    assert rig.state.episodes["a.6"].withdrawn


def test_a_first_call_that_withdraws_takes_out_what_comes(rig: LedgerRig) -> None:
    chat(rig, "a", withdraws=True)
    chat(rig, "a.2", first="a")
    rig.later(50)
    assert {state(rig, name) for name in ("a", "a.2")} == {("discarded", "withdrawn")}
    assert rig.commands.judging.status(rig.at)["withdrawn"] == 2


def test_what_opens_without_consent_is_withdrawn_and_its_users_go_on(rig: LedgerRig) -> None:
    chat(rig, "a", consents=False)
    rig.reward("a")
    rig.later(50)
    assert state(rig) == ("discarded", "withdrawn")
    chat(rig, "a~2", first="a")
    assert rig.state.episodes["a~2"].withdrawn


def test_a_withdrawn_name_stays_so_when_its_first_part_is_gone_and_opens_again() -> None:
    awaiting(rig := LedgerRig(TRAFFIC))
    rig.withdraw("a")
    rig.archive()
    rig.state.arrived(["a"], [])  # and removed again
    chat(rig, "a")
    assert rig.state.episodes["a"].withdrawn


def test_a_chat_is_known_by_a_later_part_once_its_first_is_gone(rig: LedgerRig) -> None:
    chat(rig, "a")
    chat(rig, "a~2", first="a")
    rig.abort("a")
    assert rig.state.episodes.of_chat("a") is rig.state.episodes["a"]
    rig.archive()
    rig.state.arrived(["a"], [])  # and removed again
    assert rig.state.episodes.of_chat("a") is rig.state.episodes["a~2"]
    assert rig.state.episodes.of_chat("b") is None


def test_of_a_name_that_never_ends_the_latest_parts_are_known_by_their_history(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.episodes.MOST_SEALED", 2)
    for number in range(2, 6):
        (call,) = rig.begin(f"a.{number}", traffic="chat", first="a", identified_by="body")
        rig.finish(f"a.{number}", call, marks=(Mark(f"chat:{number}"),))
        rig.later(50)
    known = rig.state.episodes.cut_lineage
    ends = [known.continued(Marks([Mark(f"chat:{number}")])) for number in range(2, 6)]
    assert ends == [(), (), ("a.4",), ("a.5",)] and first_of("a.4") == first_of("a") == "a"


def test_the_archive_is_not_read_for_a_chat_of_which_a_part_is_in_memory(rig: LedgerRig) -> None:
    """Each of its calls would wait for the disk."""
    chat(rig, "a")
    chat(rig, "a~2", first="a")
    rig.abort("a")
    rig.archive()
    rig.state.arrived(["a"], [])
    rig.state.episodes.archive = archive = Mock()
    assert rig.state.episodes.of_chat("a") is rig.state.episodes["a~2"]
    assert archive.mock_calls == []


@pytest.mark.parametrize("trained", [True, False])
def test_nothing_is_compared_with_what_was_trained_or_stale_and_is_withdrawn_since(
    rig: LedgerRig, trained: bool
) -> None:
    rig = LedgerRig(replace(TRAFFIC, traffic_idle=1e6), watch=True)
    rig.announce("m", 5)
    for name in ("a", "b"):
        chat(rig, name, task="t", version=1)
        rig.at += 5
    rig.reward("a")
    rig.later(100)  # nobody waits for b
    batch = rig.lease(group_size=2, min_group_size=1, group_wait_s=0, max_staleness=None if trained else 2)
    assert (batch is not None) is trained
    if batch is not None:
        rig.ack(batch)
    chat(rig, "a~2", first="a", task="u", withdraws=True)
    assert rig.state.episodes["a"].withdrawn and state(rig)[0] == ("trained" if trained else "discarded")
    rig.reward("b")
    late = rig.batch(group_size=2, min_group_size=1, group_wait_s=0)
    assert not any(rig.state.batches[late].earlier.values())


def test_the_name_that_was_withdrawn_last_is_forgotten_last(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.episodes.MOST_WITHDRAWN", 2)
    for name in ("a", "b"):
        chat(rig, name, withdraws=True)
    chat(rig, "a~2", first="a", withdraws=True)
    chat(rig, "c", withdraws=True)
    assert [*rig.state.episodes.withdrawn] == ["a", "c"]


def test_what_is_trained_of_a_withdrawn_batch_stays_trained(rig: LedgerRig) -> None:
    awaiting(rig)
    rig.judge("a")
    batch = rig.batch(group_size=1)
    rig.withdraw("a")
    rig.ack(batch)
    assert state(rig) == ("trained", None)
    assert list(rig.withdraw("a")) == []


@pytest.mark.parametrize("first", ["nobody", "app", "judge", "trained"])
def test_a_judge_withdraws_whatever_was_rewarded_before(rig: LedgerRig, first: str) -> None:
    awaiting(rig)
    if first != "nobody":
        (rig.reward if first == "app" else rig.judge)("a")
    if first == "trained":
        rig.ack(rig.batch(group_size=1))
    body = Judgement("other", withdraw=True, tokens=7)
    rig.run(rig.commands.judging.judge("a", body, at=rig.at))
    assert state(rig) == (("trained", None) if first == "trained" else ("discarded", "withdrawn"))
    assert rig.state.episodes["a"].withdrawn
    assert rig.commands.judging.judge("a", body, at=rig.at) == ()
    chat(rig, "a.2", first="a")
    assert rig.state.episodes["a.2"].withdrawn
    rig.archive()
    with refused(AjetError, "already_judged" if first in ("judge", "trained") else "episode_discarded"):
        rig.commands.judging.judge("a", body, at=rig.at)


def test_of_a_team_what_is_ready_goes_and_what_is_leased_when_it_comes_back(rig: LedgerRig) -> None:
    rig.open("a", members={"x": "m", "y": "n"}, task="t")
    rig.call("a", agent="x", model="m")
    rig.call("a", agent="y", model="n")
    rig.reward("a")
    batch = rig.batch(group_size=1, model="m")
    rig.withdraw("a")
    assert rig.lease(group_size=1, model="n") is None
    rig.nack(batch)
    assert state(rig) == ("discarded", "withdrawn")


def test_a_revocation_takes_out_what_its_keys_have_opened_whenever_that_was(rig: LedgerRig) -> None:
    """It is heard of a moment later, and some requests came in before."""
    for name, tenant, issued in (("a", "app", 5.0), ("b", "app", 6.0), ("c", "other", 5.0)):
        chat(rig, name, tenant=tenant, issued=issued)
    rig.presence.void = {"app": 5.0}
    while events := rig.commands.judging.revoked(rig.at):
        rig.run(events)
    chat(rig, "held", tenant="app", issued=5.0)
    chat(rig, "new", tenant="app", issued=6.0)
    rig.call("plain", tenant="app", issued=5.0)
    assert {one.id for one in rig.state.episodes.values() if one.withdrawn} == {"a", "held"}


def test_parts_leave_with_their_archive(rig: LedgerRig) -> None:
    for name in ("a", "a.2", "a.3"):
        chat(rig, name, first="a" if name != "a" else "")
    rig.abort("a.2")
    rig.archive()
    assert rig.state.episodes.parts == {"a": ["a.3"]}
    rig.abort("a.3")
    rig.archive()
    assert rig.state.episodes.parts == {}


# ---- what an operator sees


def test_who_waits_for_long_misses_a_judge(rig: LedgerRig) -> None:
    assert rig.commands.judging.alerts(rig.at) == {}
    awaiting(rig)
    assert rig.commands.judging.alerts(rig.at + SILENCE_S - 1) == {}
    assert "is `ajet judge` at work" in rig.commands.judging.alerts(rig.at + SILENCE_S)["judge"]
    awaiting(rig, "b")
    rig.judge("a")
    assert rig.commands.judging.alerts(rig.at + SILENCE_S - 1) == {}


def test_calls_that_are_never_scored_are_a_way_out(rig: LedgerRig) -> None:
    for number in range(30):
        one, two = (chat(rig, f"e{number}") for _ in range(2))
        rig.later(50)
        rig.judge(f"e{number}", 1.0, call=one)
        assert two in rig.state.episodes[f"e{number}"].transcript.calls
    assert rig.commands.judging.status(rig.at)["unjudged_calls"] == {"stop": 30}
    assert "30 of 60 calls with finish reason 'stop'" in rig.state.alerts()["unjudged 'stop'"]


def test_so_are_those_of_episodes_that_a_judge_gives_no_reward_at_all(rig: LedgerRig) -> None:
    """Nobody can tell by those that nobody has judged."""
    for number in range(60):
        awaiting(rig, f"e{number}")
        rig.judge(f"e{number}", 1.0 if number < 10 else None)
    for number in range(60, 120):
        awaiting(rig, f"e{number}")
    assert "50 of 60 calls with finish reason 'stop'" in rig.state.alerts()["unjudged 'stop'"]


def test_the_latest_calls_count_most(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.tallies.MANY_CALLS", 4)
    for number in range(4):
        awaiting(rig, f"e{number}")
        rig.judge(f"e{number}")
    assert rig.state.tallies.judged_calls == {"stop": 2}


def test_a_summary_says_what_it_is(rig: LedgerRig) -> None:
    from ajet_proxy.core.ledger.views import record

    call = awaiting(rig, "a.2", first="a")
    rig.feedback("a.2", call, value=1.0)
    rig.judge("a.2", judge="j")
    shown = record(rig.state, "a.2")
    assert (shown["traffic"], shown["first"], shown["judged_by"]) == (True, "a", "j")
    assert shown["feedback"] == [{"at": rig.at, "call": call, "value": 1.0}]
    assert [type(event) for event in rig.events if isinstance(event, ev.EpisodeJudged)] == [ev.EpisodeJudged]
