"""Users' traffic and what awaits a judgement: its life, its judge, and what users say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import judging
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.judging import MOST_AGE_S, MOST_CALLS, MOST_WAIT_S, SILENCE_S, answers
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.tokens import unpack_tokens
from ajet_sdk.errors import AjetError
from ajet_sdk.routes import Judgement, LeaseJudgements
from tests.kit.histories import everything, histories
from tests.kit.ledger_rig import SETTINGS, LedgerRig, check
from tests.kit.refused import refused
from tests.kit.traffic_rig import TrafficRig


@pytest.fixture
def rig() -> TrafficRig:
    return TrafficRig()


def waiting(rig: TrafficRig, lanes: tuple[str, ...] | None = None, **body: Any) -> list[list[str]]:
    found = rig.commands.judging.waiting(LeaseJudgements(**body), lanes, rig.at)
    return [[one.id for one in group] for group in found]


# ---- its life


def test_a_chat_that_named_no_model_awaits_a_judgement_of_who_answered() -> None:
    """No model is announced yet."""
    rig = TrafficRig(watch=False)
    rig.awaiting(model="")
    assert waiting(rig, model="m") == [["a"]]


def test_a_silent_chat_is_sealed_and_awaits_a_judgement_that_makes_it_ready(rig: TrafficRig) -> None:
    call = rig.awaiting()
    assert rig.fate() == ("sealed", None)
    assert rig.lease(group_size=1) is None
    rig.judge("a", 0.5, call=call, note="fine")
    assert rig.fate() == ("ready", None)
    known = rig.state.episodes["a"]
    assert [(one.id, one.value, one.call, one.note) for one in known.rewards.values()] == [
        (f"judge-{call}", 0.5, call, "fine")
    ]
    assert known.group_key.lane == "chat"
    assert rig.lease(group_size=1) is not None


def test_scores_of_an_agent_and_of_the_episode_have_names_of_their_own(rig: TrafficRig) -> None:
    rig.awaiting(agent="x")
    scores = ({"value": 1.0}, {"value": -1.0, "agent": "x"})
    rig.run(rig.commands.judging.judge("a", Judgement("j", scores), at=rig.at))
    assert [*rig.state.episodes["a"].rewards] == ["judge", "judge@x"]


def test_an_app_that_rewards_needs_no_judge(rig: TrafficRig) -> None:
    rig.chat("a")
    rig.reward("a")
    assert rig.fate() == ("ready", None)
    rig.awaiting("b")
    rig.reward("b", final=False)
    assert rig.fate("b") == ("ready", None)
    with refused(AjetError, "episode_ready"):
        rig.judge("b")
    assert rig.commands.judging.status(rig.at)["rewarded"] == 2


def test_of_a_holdout_it_is_recorded(rig: TrafficRig) -> None:
    rig = TrafficRig(traffic_holdout=1.0)
    rig.awaiting()
    rig.judge("a")
    assert rig.fate() == ("recorded", None)
    assert rig.state.episodes["a"].opening.evaluation is None


def test_what_is_not_of_the_sample_is_not_judged(rig: TrafficRig) -> None:
    rig = TrafficRig(traffic_sample=0.0)
    rig.chat("a")
    rig.later(50)
    assert rig.fate() == ("discarded", "no_reward")
    assert rig.commands.judging.status(rig.at)["sealed"] == 0


def test_shares_go_by_the_name_of_the_first_part(rig: TrafficRig) -> None:
    rig = TrafficRig(traffic_holdout=0.5, traffic_sample=0.5)
    kinds = set()
    for number in range(32):
        rig.chat(f"chat{number}")
        rig.chat(f"chat{number}.2", first=f"chat{number}")
        one, two = (rig.state.episodes[f"chat{number}{part}"].opening for part in ("", ".2"))
        assert (one.judged, one.eval) == (two.judged, two.eval)
        kinds.add((one.judged, one.eval))
    assert len(kinds) == 4


@pytest.mark.parametrize("way", ["harness", "body", "lineage"])
def test_under_a_name_that_outlives_it_a_long_chat_is_sealed(rig: TrafficRig, way: str) -> None:
    for _ in range(MOST_CALLS):
        rig.chat("a", identified_by=way)
    rig.chat("b", identified_by="path")
    rig.chat("c", identified_by=way)
    rig.tick()
    assert [*rig.state.episodes.awaiting] == ["a"]
    while rig.at < 1000 + MOST_AGE_S:
        rig.at += 40
        rig.heartbeat("b")
        if rig.state.episodes["c"].state == "open":
            rig.heartbeat("c")
        if rig.at < 1900:
            assert rig.fate("b") == ("open", None)
        rig.tick()
    assert rig.fate("b") == ("sealed", None)  # by its wall timeout
    assert rig.fate("c") == ("sealed", None)


def test_a_chat_with_a_call_in_flight_awaits_once_that_has_ended(rig: TrafficRig) -> None:
    for _ in range(MOST_CALLS):
        rig.chat("a", identified_by="body")
    (late,) = rig.begin("a")
    rig.tick()
    assert rig.fate() == ("sealed", None)
    assert not rig.state.episodes.awaiting
    rig.finish("a", late)
    assert [*rig.state.episodes.awaiting] == ["a"]


def test_nothing_whole_awaits_nothing(rig: TrafficRig) -> None:
    (call,) = rig.begin("a", traffic="chat")
    rig.lose("a", call)
    rig.later(50)
    assert rig.fate()[0] == "discarded"
    assert rig.commands.judging.status(rig.at)["lost"] == 1


def test_a_call_that_is_taken_back_may_leave_nothing_to_judge(rig: TrafficRig) -> None:
    call = rig.awaiting()
    rig.lose("a", call, taken_back=True)
    assert rig.fate()[0] == "discarded"


def test_what_nobody_judges_in_a_day_is_discarded(rig: TrafficRig) -> None:
    rig.awaiting()
    rig.later(MOST_WAIT_S - 1)
    assert rig.fate() == ("sealed", None)
    rig.later(1)
    assert rig.fate() == ("discarded", "not_judged")


def test_while_the_daemon_is_away_nobody_waits(rig: TrafficRig) -> None:
    rig.awaiting()
    rig.at += 3 * MOST_WAIT_S
    rig.restart()
    rig.tick()
    assert rig.fate() == ("sealed", None)
    rig.later(MOST_WAIT_S)
    assert rig.fate() == ("discarded", "not_judged")


def test_the_oldest_make_room_for_what_comes(rig: TrafficRig) -> None:
    for number in range(5):
        rig.awaiting(f"chat{number}")
        assert len(rig.state.episodes.awaiting) <= 3
    assert [*rig.state.episodes.awaiting] == ["chat2", "chat3", "chat4"]
    rig.run(rig.commands.expire(rig.at, tight=True))
    assert not rig.state.episodes.awaiting
    status = rig.commands.judging.status(rig.at)
    assert (status["sealed"], status["not_judged"]) == (5, 5)


def test_tight_memory_discards_more_at_once_than_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "AT_ONCE", 2)
    monkeypatch.setattr(judging, "ROOM", 3)
    rig = TrafficRig(watch=False, traffic_backlog=5)
    for number in range(5):
        rig.awaiting(f"chat{number}")
    rig.run(rig.commands.expire(rig.at, tight=True))
    assert [*rig.state.episodes.awaiting] == ["chat3", "chat4"]


def test_the_cap_holds_whatever_seals_and_counts_what_is_to_be_judged_alone(rig: TrafficRig) -> None:
    """Many at once, too, of which some await nothing."""
    for number in range(3):
        rig.awaiting(f"chat{number}")
    for number in range(3, 8):
        rig.chat(f"chat{number}")
        rig.call(f"plain{number}", traffic="chat", judged=False)
    rig.later(50)
    assert [*rig.state.episodes.awaiting] == ["chat5", "chat6", "chat7"]
    rig.chat("chat8")
    rig.seal("chat8")
    assert [*rig.state.episodes.awaiting] == ["chat6", "chat7", "chat8"]
    for number in range(9, 14):
        rig.call(f"plain{number}", traffic="chat", judged=False)
    rig.later(50)
    assert [*rig.state.episodes.awaiting] == ["chat6", "chat7", "chat8"], "what is not judged needs no room"
    assert rig.commands.judging.status(rig.at)["sealed"] == 9


def test_ordinary_groups_can_be_judged_too(rig: TrafficRig) -> None:
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
    assert rig.fate("d") == ("discarded", "idle_timeout")


def test_another_run_of_the_model_takes_what_awaits_too(rig: TrafficRig) -> None:
    rig.announce(run="a")
    rig.awaiting()
    rig.announce(version=0, run="b")
    assert rig.fate() == ("discarded", "other_run")


# ---- its judge


def test_a_judgement_counts_once(rig: TrafficRig) -> None:
    call = rig.awaiting()
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
    rig: TrafficRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.episode.MAX_NOTES", 10)
    call = rig.awaiting()
    body = Judgement("j", ({"value": 1.0, "call": call, "note": "x" * 8}, {"value": 0.5, "note": "y" * 8}))
    rig.run(rig.commands.judging.judge("a", body, at=rig.at))
    assert [one.note for one in rig.state.episodes["a"].rewards.values()] == ["(cut)", "x" * 8]
    assert rig.commands.judging.judge("a", body, at=rig.at) == ()


@pytest.mark.parametrize("order", [1, -1])
def test_a_judgement_counts_whole_in_whatever_order_it_is_told(rig: TrafficRig, order: int) -> None:
    rig = TrafficRig(traffic_holdout=1.0)
    call = rig.awaiting(agent="x")
    scores = ({"value": 1.0, "call": call}, {"value": 0.25, "agent": "x"}, {"value": 0.5})
    rig.run(rig.commands.judging.judge("a", Judgement("j", scores[::order]), at=rig.at))
    assert rig.state.episodes["a"].reward() == 1.75
    assert rig.commands.judging.status(rig.at)["holdout"]["m"][0]["mean"] == pytest.approx(1.75 / 3)


def test_a_chat_that_is_over_and_holds_up_a_group_ends_in_one_step(rig: TrafficRig) -> None:
    """As after a laptop's sleep: both have become true at once."""
    rig = TrafficRig(traffic_idle=900.0)
    rig.lease(group_size=2)
    for name in ("one", "two"):
        rig.chat(name, task="t")
        rig.at += 5
        if name == "one":
            rig.reward("one")
    rig.withdraw("two")
    rig.later(1000)
    assert rig.fate("two") == ("discarded", "withdrawn")


def test_a_user_who_is_still_answered_ends_no_chat(rig: TrafficRig) -> None:
    """Not even at the age at which every other episode is."""
    rig.begin("a", traffic="chat")
    for _ in range(3):
        rig.later(SETTINGS.wall_timeout)
        assert rig.fate() == ("sealed", None)


def test_a_clock_that_is_set_back_moves_what_awaits_with_it(rig: TrafficRig) -> None:
    rig.at = 1e9
    rig.awaiting("old")
    rig.awaiting("judged")
    rig.judge("judged")
    rig.begin("runs", traffic="chat")
    rig.seal("runs")
    rig.at = 1e6
    rig.restart()
    assert rig.commands.judging.status(rig.at)["oldest_s"] <= 100
    rig.at += SILENCE_S
    assert rig.commands.judging.alerts(rig.at)
    rig.awaiting("new")
    rig.state.derive()
    assert [*rig.state.episodes.awaiting] == ["old", "new"]
    assert rig.state.episodes["runs"].sealed_at == 1e6
    rig.later(MOST_WAIT_S)
    assert not rig.state.episodes.awaiting


def test_what_follows_from_the_parts_of_a_chat_is_made_anew_as_it_was(rig: TrafficRig) -> None:
    rig.chat("a")
    rig.chat("a~2", first="a")
    for _ in range(2):
        rig.state.derive()
        assert rig.state.episodes.parts == {"a": ["a~2"]}


def test_a_recorded_chat_that_is_rewarded_later_counts_as_rewarded(rig: TrafficRig) -> None:
    rig = TrafficRig(traffic_holdout=1.0)
    (call,) = rig.begin("a", traffic="chat")
    rig.lose("a", call)
    rig.seal("a")
    rig.reward("a")
    status = rig.commands.judging.status(rig.at)
    assert (status["sealed"], status["rewarded"], status["lost"]) == (1, 1, 0)


def test_no_score_is_no_judgement(rig: TrafficRig) -> None:
    rig.awaiting()
    rig.judge("a", None)
    assert rig.fate() == ("discarded", "not_judged")
    assert rig.judge("a", None) == ()
    with refused(AjetError, "episode_discarded"):
        rig.judge("a", 1.0)


@pytest.mark.parametrize("name", ["open", "plain", "unknown"])
def test_what_awaits_nothing_takes_no_judgement(rig: TrafficRig, name: str) -> None:
    rig.chat("open")
    rig.ready("t")
    with pytest.raises(AjetError):
        rig.judge("plain" if name == "plain" else name)


def test_a_score_of_no_call_is_refused(rig: TrafficRig) -> None:
    rig.awaiting()
    with refused(AjetError, "unknown_call"):
        rig.judge("a", 1.0, call="other")
    assert rig.fate() == ("sealed", None)


def test_one_judge_at_a_time_until_its_lease_lapses(rig: TrafficRig) -> None:
    rig.awaiting()
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
    rig: TrafficRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        rig.awaiting(name)
    looks, plain = list[str](), Episode.trains

    def trains(one: Episode) -> list[str]:
        looks.append(one.id)
        return plain(one)

    monkeypatch.setattr(Episode, "trains", trains)
    ((first,), *_) = [next(rig.commands.judging.waiting(LeaseJudgements(model="m"), None, rig.at))]
    assert (first.id, looks) == ("c", ["c"])


def test_an_evaluation_comes_before_all_traffic(rig: TrafficRig) -> None:
    """A trainer waits for it, and traffic may never end."""
    rig.open("old", task="t", eval=True, judged=True)
    rig.call("old")
    rig.seal("old")
    call = rig.awaiting("a")
    rig.feedback("a", value=1.0, call=call)
    rig.awaiting("b")
    assert waiting(rig)[:3] == [["old"], ["a"], ["b"]]


def test_feedback_comes_first_and_then_the_newest(rig: TrafficRig) -> None:
    for name in ("a", "b", "c"):
        rig.awaiting(name)
    rig.feedback("a", value=1.0)
    assert waiting(rig) == [["a"], ["c"], ["b"]]
    assert waiting(rig, ("other",)) == waiting(rig, lane="other") == waiting(rig, model="n") == []
    assert waiting(rig, ("chat",), lane="chat", model="m") == [["a"], ["c"], ["b"]]


def test_a_judge_sees_what_came_before_and_after_each_answer(rig: TrafficRig) -> None:
    first = rig.chat("a", prompt=(1, 2), sampled=(3,))
    rig.at += 1
    again = rig.chat("a", prompt=(1, 2, 3, 4), sampled=(5,))
    rig.at += 1
    last = rig.chat("a", prompt=(1, 2, 3, 4), sampled=(6,))
    judge = rig.call("a", (9,), (9,), model="other")
    seen = answers(rig.state.episodes["a"], "strict")()
    assert [(one.call, one.kind, *map(unpack_tokens, (one.before, one.answer, one.next))) for one in seen] == [
        (first, "reply", (1, 2), (3,), (4,)), (again, "again", (1, 2, 3, 4), (5,), ()),
        (last, "none", (1, 2, 3, 4), (6,), ()),
    ]
    assert judge not in [one.call for one in seen]


def test_a_judge_sees_the_last_tokens_of_a_long_prompt(rig: TrafficRig) -> None:
    rig.chat("a", prompt=tuple(range(judging.BEFORE + 5)))
    assert unpack_tokens(answers(rig.state.episodes["a"], "strict")()[0].before) == tuple(range(5, judging.BEFORE + 5))


def test_a_reply_is_seen_whose_history_leaves_the_reasoning_out(rig: TrafficRig) -> None:
    """As a plain client does, which keeps an answer's content alone."""
    question, thought, said = tuple(range(30)), (91, 92, 93), (40, 2)
    rig.chat("a", prompt=question, sampled=(*thought, *said))
    rig.at += 1
    rig.chat("a", prompt=(50, 51), sampled=(52, 2), agent="helper")
    rig.chat("a", prompt=(60, 61), sampled=(62, 2))
    rig.at += 1
    rig.chat("a", prompt=(*question, *said, 70, 71), sampled=(*thought, 41, 2))
    rig.at += 1
    rig.chat("a", prompt=(*question, *said, 70, 71), sampled=(*thought, 42, 2))
    rig.at += 1
    rig.chat("a", prompt=(*question, *said, 70, 71, 41, 2, 80), sampled=(43, 2))
    seen = answers(rig.state.episodes["a"], "strict")()
    assert [(one.kind, unpack_tokens(one.next)) for one in seen] == [
        ("reply", (70, 71)), ("none", ()), ("none", ()), ("again", ()), ("none", ()), ("none", ()),
    ]


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


def test_feedback_is_evidence_and_the_latest_counts(rig: TrafficRig) -> None:
    call = rig.chat("a")
    rig.feedback("a", call, value=1.0)
    assert rig.feedback("a", call, value=1.0) == ()
    rig.feedback("a", call, value=-1.0, text="no")
    rig.feedback("a", better="this")
    assert rig.fate() == ("open", None)
    assert rig.state.episodes["a"].reward() is None
    assert [said.to_json() for said in rig.state.episodes["a"].feedback.values()] == [
        {"at": rig.at, "call": call, "value": -1.0, "text": "no"}, {"at": rig.at, "better": "this"},
    ]
    rig.reward("a")
    rig.batch(group_size=1)
    rig.feedback("a", call, value=0.0)
    assert rig.state.episodes["a"].feedback[call].value == 0.0


def test_feedback_on_what_is_archived_is_refused(rig: TrafficRig) -> None:
    rig.chat("a")
    rig.abort("a")
    rig.archive()
    with refused(AjetError, "episode_archived"):
        rig.feedback("a", value=1.0)


# ---- what an operator sees


def test_who_waits_for_long_misses_a_judge(rig: TrafficRig) -> None:
    assert rig.commands.judging.alerts(rig.at) == {}
    rig.awaiting()
    assert rig.commands.judging.alerts(rig.at + SILENCE_S - 1) == {}
    assert "is `ajet judge` at work" in rig.commands.judging.alerts(rig.at + SILENCE_S)["judge"]
    rig.awaiting("b")
    rig.judge("a")
    assert rig.commands.judging.alerts(rig.at + SILENCE_S - 1) == {}


def test_a_summary_says_what_it_is(rig: TrafficRig) -> None:
    from ajet_proxy.core.ledger.views import record

    call = rig.awaiting("a.2", first="a")
    rig.feedback("a.2", call, value=1.0)
    rig.judge("a.2", judge="j")
    shown = record(rig.state, "a.2")
    assert (shown["traffic"], shown["first"], shown["judged_by"]) == (True, "a", "j")
    assert shown["feedback"] == [{"at": rig.at, "call": call, "value": 1.0}]
    assert [type(event) for event in rig.events if isinstance(event, ev.EpisodeJudged)] == [ev.EpisodeJudged]
