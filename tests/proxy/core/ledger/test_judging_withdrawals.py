"""Chats that are withdrawn: by a header of any call, without consent, by a judge, and with their keys."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger import episodes
from ajet_sdk.errors import AjetError
from ajet_sdk.routes import Judgement
from tests.kit.refused import refused
from tests.kit.traffic_rig import TrafficRig


@pytest.fixture
def rig() -> TrafficRig:
    return TrafficRig()


def test_a_header_of_any_call_takes_all_parts_out(rig: TrafficRig) -> None:
    for name in ("a", "a.2", "a.3", "a.4"):
        rig.awaiting(name, first="a" if name != "a" else "")
    rig.judge("a.2")
    rig.judge("a.3")
    rig.chat("a.5", first="a")
    leased = rig.batch(group_size=1)
    (name,) = rig.state.batches[leased].episodes()
    rig.chat("a.5", withdraws=True)
    states = {one.id: (one.state, one.reason) for one in rig.state.episodes.values()}
    gone = ("discarded", "withdrawn")
    assert states.pop(name) == ("leased", None)
    assert states.pop("a.5") == ("open", None)  # its user is answered
    assert states.pop("a")[0] == states["a.4"][0] == "discarded"
    assert states.pop("a.4") == gone
    assert set(states.values()) == {gone}
    rig.nack(leased)
    assert rig.fate(name) == gone
    rig.later(50)
    assert rig.fate("a.5") == gone
    rig.chat("a.6", first="a")
    assert rig.state.episodes["a.6"].withdrawn


def test_a_first_call_that_withdraws_takes_out_what_comes(rig: TrafficRig) -> None:
    rig.chat("a", withdraws=True)
    rig.chat("a.2", first="a")
    rig.later(50)
    assert {rig.fate(name) for name in ("a", "a.2")} == {("discarded", "withdrawn")}
    assert rig.commands.judging.status(rig.at)["withdrawn"] == 2


def test_what_opens_without_consent_is_withdrawn_and_its_users_go_on(rig: TrafficRig) -> None:
    rig.chat("a", consents=False)
    rig.reward("a")
    rig.later(50)
    assert rig.fate() == ("discarded", "withdrawn")
    rig.chat("a~2", first="a")
    assert rig.state.episodes["a~2"].withdrawn


def test_a_withdrawn_name_stays_so_when_its_first_part_is_gone_and_opens_again() -> None:
    rig = TrafficRig(watch=False)
    rig.awaiting()
    rig.withdraw("a")
    rig.archive()
    rig.state.arrived(["a"], [])  # and removed again
    rig.chat("a")
    assert rig.state.episodes["a"].withdrawn


@pytest.mark.parametrize("trained", [True, False])
def test_nothing_is_compared_with_what_was_trained_or_stale_and_is_withdrawn_since(
    rig: TrafficRig, trained: bool
) -> None:
    rig = TrafficRig(traffic_idle=1e6)
    rig.announce("m", 5)
    for name in ("a", "b"):
        rig.chat(name, task="t", version=1)
        rig.at += 5
    rig.reward("a")
    rig.later(100)  # nobody waits for b
    batch = rig.lease(group_size=2, min_group_size=1, group_wait_s=0, max_staleness=None if trained else 2)
    assert (batch is not None) is trained
    if batch is not None:
        rig.ack(batch)
    rig.chat("a~2", first="a", task="u", withdraws=True)
    assert rig.state.episodes["a"].withdrawn and rig.fate()[0] == ("trained" if trained else "discarded")
    rig.reward("b")
    late = rig.batch(group_size=2, min_group_size=1, group_wait_s=0)
    assert not any(rig.state.batches[late].earlier.values())


def test_what_is_trained_of_a_withdrawn_batch_stays_trained(rig: TrafficRig) -> None:
    rig.awaiting()
    rig.judge("a")
    batch = rig.batch(group_size=1)
    rig.withdraw("a")
    rig.ack(batch)
    assert rig.fate() == ("trained", None)
    assert list(rig.withdraw("a")) == []


@pytest.mark.parametrize("first", ["nobody", "app", "judge", "trained"])
def test_a_judge_withdraws_whatever_was_rewarded_before(rig: TrafficRig, first: str) -> None:
    rig.awaiting()
    if first != "nobody":
        (rig.reward if first == "app" else rig.judge)("a")
    if first == "trained":
        rig.ack(rig.batch(group_size=1))
    body = Judgement("other", withdraw=True, tokens=7)
    rig.run(rig.commands.judging.judge("a", body, at=rig.at))
    assert rig.fate() == (("trained", None) if first == "trained" else ("discarded", "withdrawn"))
    assert rig.state.episodes["a"].withdrawn
    assert rig.commands.judging.judge("a", body, at=rig.at) == ()
    rig.chat("a.2", first="a")
    assert rig.state.episodes["a.2"].withdrawn
    rig.archive()
    assert rig.commands.judging.judge("a", body, at=rig.at) == ()


def test_of_a_team_what_is_ready_goes_and_what_is_leased_when_it_comes_back(rig: TrafficRig) -> None:
    rig.open("a", members={"x": "m", "y": "n"}, task="t")
    rig.call("a", agent="x", model="m")
    rig.call("a", agent="y", model="n")
    rig.reward("a")
    batch = rig.batch(group_size=1, model="m")
    rig.withdraw("a")
    assert rig.lease(group_size=1, model="n") is None
    rig.nack(batch)
    assert rig.fate() == ("discarded", "withdrawn")


def test_a_revocation_takes_out_what_its_keys_have_opened_whenever_that_was(rig: TrafficRig) -> None:
    """It is heard of a moment later, and some requests came in before."""
    for name, tenant, issued in (("a", "app", 5.0), ("b", "app", 6.0), ("c", "other", 5.0)):
        rig.chat(name, tenant=tenant, issued=issued)
    rig.presence.void = {"app": 5.0}
    while events := rig.commands.judging.revoked(rig.at):
        rig.run(events)
    rig.chat("held", tenant="app", issued=5.0)
    rig.chat("new", tenant="app", issued=6.0)
    rig.call("plain", tenant="app", issued=5.0)
    assert {one.id for one in rig.state.episodes.values() if one.withdrawn} == {"a", "held"}


def test_a_revocation_of_what_comes_without_a_key_ends_with_what_was_there(rig: TrafficRig) -> None:
    rig.chat("before")
    rig.presence.void = {"": rig.at}
    rig.at += 1
    rig.chat("after")
    rig.run(rig.commands.judging.revoked(rig.at))
    assert [one.withdrawn for one in map(rig.state.episodes.__getitem__, ("before", "after"))] == [True, False]


def test_a_judge_withdraws_what_goes_on_of_a_chat_whose_first_part_is_archived(rig: TrafficRig) -> None:
    call = rig.awaiting()
    rig.judge("a", 0.5, call=call)
    rig.ack(rig.batch(group_size=1))
    rig.archive()
    rig.chat("a.2", first="a")
    rig.run(rig.commands.judging.judge("a", Judgement("judge", withdraw=True), at=rig.at))
    assert rig.state.episodes["a.2"].withdrawn


def test_a_judge_withdraws_nothing_archived_that_is_no_chat(rig: TrafficRig) -> None:
    rig.call("plain")
    rig.abort("plain")
    rig.archive()
    with refused(AjetError, "episode_discarded"):
        rig.commands.judging.judge("plain", Judgement("judge", withdraw=True), at=rig.at)


def test_what_is_archived_is_taken_back_too(rig: TrafficRig) -> None:
    call = rig.awaiting()
    rig.judge("a", 0.5, call=call)
    rig.ack(rig.batch(group_size=1))
    rig.call("plain")
    rig.abort("plain")
    rig.archive()
    rig.run(rig.commands.judging.take_back(("a", "plain", "never", ""), rig.at))
    assert list(rig.state.episodes.withdrawn) == ["a"]
    assert rig.commands.judging.take_back(("a",), rig.at) == ()
    rig.chat("a.2", first="a")
    assert rig.state.episodes["a.2"].withdrawn


@pytest.mark.parametrize("archived", [False, True])
def test_a_later_part_is_withdrawn_as_those_before_it_however_many_others_are(
    monkeypatch: pytest.MonkeyPatch, archived: bool
) -> None:
    monkeypatch.setattr(episodes, "MOST_WITHDRAWN", 1)
    rig = TrafficRig(watch=False)
    rig.chat("a", consents=False)
    rig.chat("b", consents=False)
    assert (list(rig.state.episodes.refused), list(rig.state.episodes.withdrawn)) == (["b"], [])
    assert rig.state.episodes.is_withdrawn("a")
    rig.later(50)
    if archived:
        rig.archive()
        assert not rig.state.episodes.is_withdrawn("a"), "memory does not know it"
    rig.chat("a.2", first="a")
    assert rig.state.episodes["a.2"].withdrawn


def test_what_was_taken_back_is_remembered_beside_what_never_consented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MOST_WITHDRAWN", 1)
    rig = TrafficRig(watch=False)
    rig.chat("a")
    rig.run(rig.commands.judging.take_back(("a",), rig.at))
    rig.chat("b", consents=False)
    rig.chat("a.2", first="a")
    known = rig.state.episodes
    assert (list(known.withdrawn), list(known.refused)) == (["a"], ["b"])
    rig.later(50)
    rig.archive()
    assert known.is_withdrawn("a") and known.is_withdrawn("b")


def test_a_chat_goes_on_withdrawn_whose_key_was_revoked_in_the_archive(rig: TrafficRig) -> None:
    call = rig.awaiting(tenant="app", issued=5.0)
    rig.judge("a", 0.5, call=call)
    rig.ack(rig.batch(group_size=1))
    rig.archive()
    rig.presence.void = {"app": 5.0}
    rig.chat("a.2", first="a", tenant="app", issued=6.0)
    assert rig.state.episodes["a.2"].withdrawn


def test_chats_that_nobody_can_tell_apart_are_taken_back_together(rig: TrafficRig) -> None:
    for name in ("a", "b", "c"):
        rig.chat(name)
    rig.run(rig.commands.judging.take_back(("a", "b"), rig.at))
    assert [rig.state.episodes[name].withdrawn for name in "abc"] == [True, True, False]
    assert rig.commands.judging.take_back(("a", "b"), rig.at) == ()
    assert len(rig.commands.judging.take_back(("c", "c"), rig.at)) == 1
