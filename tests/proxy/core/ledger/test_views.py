"""Records and the status page as clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.ledger import transcript, views
from ajet_proxy.core.ledger.views import Tokens, Wanted, parts, records
from ajet_proxy.core.trajectory.timeline import Timeline, merge_texts
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import EPISODE_STATES
from tests.kit.ledger_rig import LedgerRig, Shelf


@pytest.fixture
def rig() -> LedgerRig:
    """It is not checked after each event: merges are counted here."""
    return LedgerRig()


def test_the_status_of_nothing(rig: LedgerRig) -> None:
    status = views.status(rig.state)
    assert status["episodes"] == {"opened": 0, **dict.fromkeys(EPISODE_STATES, 0)}
    assert (status["models"], status["drift"], status["gate"]["state"]) == ({}, {}, "open")
    assert status["gate"]["since"] is None
    assert status["version"]


def test_the_status_of_something(rig: LedgerRig) -> None:
    for state in ("trained", "leased", *(set(EPISODE_STATES) - {"trained", "leased"})):
        rig.in_state(state)
    rig.announce("m", 3, ("http://engine",))
    rig.gate_close()
    status = json.loads(json.dumps(views.status(rig.state)))
    assert status["episodes"] == {"opened": 7, **dict.fromkeys(EPISODE_STATES, 1)}
    assert status["models"] == {"m": {"policy_version": 3, "gate": "closing", "upstreams": ["http://engine"]}}
    assert status["gate"] == {"state": "closing", "since": 1000.0, "reason": "weights"}
    assert status["groups"] == {"waiting": 1, "ready": 0, "leased": 1}
    assert status["batches"] == {"leased": 1, "total": 2}
    assert status["calls"] == {"running": 1, "complete": 4, "lost": 0}
    assert status["captures"] == {"complete": 4}
    assert status["discarded"] == {"aborted": 1}
    calls = [call for name in rig.state.episodes for call in views.record(rig.state, name)["calls"]]
    tokens = [call for call in calls if call["complete"]]
    assert status["tokens"]["sampled"] == sum(call["sampled_tokens"] for call in tokens) > 0


def test_a_record_has_calls_and_timelines_at_any_time(rig: LedgerRig) -> None:
    episode = rig.open(task="t", model="m", metadata={"k": [1]}, tenant="acme", members={"a": "m"})
    done = rig.call(episode, (1, 2), (3, 4), tenant="acme", agent="a")
    again = rig.call(episode, (9,), (8,), tenant="acme", agent="a")
    (lost,) = rig.begin(episode, tenant="acme")
    rig.lose(episode, lost, "truncated")
    (running,) = rig.begin(episode, tenant="acme")
    rig.reward(episode, 0.5, final=False, note="half")

    record = json.loads(json.dumps(views.record(rig.state, episode, tokens="none")))
    assert {name: record[name] for name in ("task", "state", "model", "eval", "reward", "in_flight", "tenant")} == {
        "task": "t", "state": "open", "model": "m", "eval": False, "reward": 0.5, "in_flight": 1, "tenant": "acme",
    }
    assert (record["opened_at"], record["identified_by"]) == (1000.0, rig.state.episodes[episode].opening.identified_by)
    assert (record["metadata"], record["members"], record["shares"]) == ({"k": [1]}, {"a": "m"}, {})
    assert record["rewards"][0] | {"id": ""} == {"id": "", "value": 0.5, "final": False, "at": 1000.0, "note": "half"}
    first, _, third, fourth = record["calls"]
    assert (first["call"], first["complete"], first["prompt_tokens"], first["sampled_tokens"]) == (done, True, 2, 2)
    assert (third["call"], third["complete"], third["reason"]) == (lost, False, "truncated")
    assert (fourth["call"], fourth["complete"], fourth["in_flight"]) == (running, False, True)
    assert record["timelines"] == [
        {"sample": f"{episode}/0", "model": "m", "agent": "a", "calls": [done], "tokens": 4, "sampled_tokens": 2},
        {"sample": f"{episode}/1", "model": "m", "agent": "a", "calls": [again], "tokens": 2, "sampled_tokens": 1,
         "broken_by": "new_chain"},
    ]


@pytest.mark.parametrize("state", ["open", "sealed", "ready", "leased", "trained", "recorded", "discarded"])
def test_a_record_with_tokens_has_them_in_every_state(rig: LedgerRig, state: str) -> None:
    episode = rig.in_state(state)
    if state == "open":
        rig.call(episode)
    record = json.loads(json.dumps(views.record(rig.state, episode, tokens="all")))
    whole = [call for call in record["calls"] if call["complete"]]
    assert len(whole) == (state not in ("sealed", "discarded"))
    for call in whole:
        assert (call["prompt_token_ids"], call["token_ids"], call["logprobs"]) == ([1, 2], [3], [-0.5])
        assert call["policy_version"] == 0
    for timeline in record["timelines"]:
        assert (timeline["token_ids"], timeline["loss_mask"]) == ([1, 2, 3], [0, 0, 1])
    lean = views.record(rig.state, episode, tokens="timelines")
    assert lean["timelines"] == record["timelines"]
    assert not any("token_ids" in call for call in lean["calls"])


def test_the_parts_are_the_record_as_it_was_when_it_was_asked_for(rig: LedgerRig) -> None:
    episode = rig.open()
    rig.call(episode)
    running = rig.begin(episode, choices=3)
    kinds: tuple[Tokens, ...] = ("all", "timelines", "none")
    for call, tokens in zip(running, kinds, strict=True):
        before = views.record(rig.state, episode, tokens=tokens)
        shown = parts(rig.state, episode, tokens=tokens)
        rig.call(episode)
        rig.lose(episode, call)
        assert {name: views.made(part) for name, part in shown.items()} == before
        assert len(views.record(rig.state, episode, tokens=tokens)["calls"]) == len(before["calls"]) + 1


def test_an_episode_is_merged_again_for_a_look_only_if_its_calls_have_changed(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = 0

    def counted(*of: Any) -> tuple[Timeline, ...]:
        nonlocal merged
        merged += 1
        return merge_texts(*of)

    monkeypatch.setattr(transcript, "merge_texts", counted)
    name = rig.open()
    rig.call(name, (1, 2), (3,))
    first = views.record(rig.state, name)
    rig.reward(name, final=False)
    assert views.record(rig.state, name)["timelines"] == first["timelines"]
    assert merged == 1
    rig.call(name, (1, 2, 3, 4), (5,))
    assert len(views.record(rig.state, name)["timelines"][0]["calls"]) == merged == 2


def test_the_shares_of_an_episode_are_in_its_record(rig: LedgerRig) -> None:
    episode = rig.ready(members={"a": "m", "b": "n", "c": "o"})
    rig.ack(rig.batch(model="m", group_size=1))
    rig.batch(model="n", group_size=1)
    assert views.record(rig.state, episode)["shares"] == {"m": "trained", "n": "leased", "o": "ready"}


def test_who_learned_what_from_an_episode(rig: LedgerRig) -> None:
    """Each model with what it sampled and earned, and what came of its share."""
    rig.announce("m", 3)
    rig.open("ep", task="t", members={"a": "m", "b": "n", "c": "o"}, teachers={"d": "judge"})

    def told() -> dict[str, Any]:
        shown: dict[str, Any] = views.record(rig.state, "ep")["models"]
        counts = {"calls", "sampled_tokens"}
        return {model: {name: one[name] for name in one if name not in counts} for model, one in shown.items()}

    for model in ("m", "m", "n", "o", "judge"):
        rig.call("ep", model=model)
    rig.reward("ep", 0.5, model="m", final=False)
    rig.reward("ep", 2.0, model="n", final=False)
    assert told()["m"] == {"reward": 0.5}
    rig.seal("ep")
    assert told() == {
        "m": {"reward": 0.5, "share": "ready"}, "n": {"reward": 2.0, "share": "ready"},
        "o": {"reward": None, "share": "ready"}, "judge": {"reward": None},
    }
    first, second = rig.lease(model="m", group_size=1), rig.lease(model="n", group_size=1)
    assert rig.lease(model="o", group_size=1) is None
    assert first is not None and second is not None
    rig.ack(first, version=4)
    rig.ack(second, ep="too_long: 9 tokens")
    calls = views.record(rig.state, "ep")["models"]
    assert [(one["calls"], one["sampled_tokens"] > 0) for one in calls.values()] == [(2, True), *[(1, True)] * 3]
    assert rig.lease(model="o", group_size=1) is None
    assert rig.state_of("ep") == "trained"
    why = "no_reward: no whole call is of what was rewarded: model 'm', model 'n'"
    assert told() == {
        "m": {"reward": 0.5, "share": "trained", "policy_version": 4},
        "n": {"reward": 2.0, "share": "filtered", "reason": "filtered: too_long: 9 tokens"},
        "o": {"reward": None, "share": "filtered", "reason": why},
        "judge": {"reward": None},
    }


def test_what_a_discarded_episode_would_have_taught(rig: LedgerRig) -> None:
    rig.open("ep", model="m")
    rig.call("ep")
    rig.reward("ep", 1.0)
    rig.abort("ep")
    (one,) = views.record(rig.state, "ep")["models"].values()
    assert (one["calls"], one["reward"], one.get("share")) == (1, 1.0, None)


def test_a_model_that_nobody_trains_is_an_alert(rig: LedgerRig) -> None:
    rig.open("ep", members={"a": "m", "b": "n"})
    for model in "mn":
        rig.call("ep", model=model)
    rig.reward("ep")
    assert list(rig.state.alerts()) == []
    rig.announce("m", 1)
    assert list(rig.state.alerts().values()) == ["episodes wait for a trainer of model 'n', and none has announced it"]
    rig.announce("n", 1)
    assert list(rig.state.alerts()) == []


def test_records_come_newest_first(rig: LedgerRig) -> None:
    names = [rig.open() for _ in range(4)]
    rig.abort(names[1])
    shown = records(rig.state, Wanted(3))["episodes"]
    assert [item["episode"] for item in shown] == [names[3], names[2], names[1]]
    assert listed(rig, Wanted(3, "open")) == ([names[3], names[2], names[0]], None)
    assert "calls" not in shown[0]
    with pytest.raises(BadRequest):
        records(rig.state, Wanted(3, "asleep"))
    with pytest.raises(BadRequest):
        records(rig.state, Wanted(before="ep-none"))


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_pages_of_records_add_up_to_the_whole_list(rig: LedgerRig, limit: int) -> None:
    names = [rig.open(task="t" if number % 3 else "u") for number in range(9)]
    for task, expected in ((None, names[::-1]), ("u", [names[6], names[3], names[0]]), ("none", [])):
        seen: list[str] = []
        before: str | None = None
        for _ in range(len(names) + 1):
            page, before = listed(rig, Wanted(limit, task=task, before=before))
            seen += page
            if before is None:
                break
        assert seen == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_pages_go_on_into_the_archive(limit: int) -> None:
    shelf = Shelf()
    rig = LedgerRig(archive=shelf)
    names = [rig.in_state("trained" if number % 2 else "open") for number in range(8)]
    rig.archive(kept=1)
    shelf.take(rig.state, 2)
    for state, expected in (
        ("trained", [names[number] for number in (7, 5, 3, 1)]),
        (None, [names[number] for number in (7, 6, 4, 2, 0, 5, 3, 1)]),
    ):
        seen, before = [], None
        while not seen or before is not None:
            page, before = listed(rig, Wanted(limit, state, before=before))
            seen += page
        assert seen == expected
    assert listed(rig, Wanted(9, task="none")) == ([], None)


def listed(rig: LedgerRig, wanted: Wanted) -> tuple[list[str], str | None]:
    answer = records(rig.state, wanted)
    return [item["episode"] for item in answer["episodes"]], answer.get("next")
