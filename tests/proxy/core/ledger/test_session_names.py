"""Which episode a session's name stands for, as episodes under it open and end."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import session_names
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.session_names import SessionNames, base_of
from ajet_sdk.bodies import check_id
from tests.kit.ledger_rig import LedgerRig, blank


def name_of(rig: LedgerRig, name: str = "s", tenant: str = "", *, for_reward: bool = False) -> str:
    asked: list[str] = []

    def find(episode: str) -> Episode | None:
        asked.append(episode)
        return rig.state.episodes.find(episode)

    found = SessionNames(rig.state.episodes.values()).current(name, tenant, find, for_reward=for_reward)
    assert len(asked) < 20
    return found


def test_a_call_goes_to_the_open_episode_or_to_the_next_and_a_reward_to_the_latest(rig: LedgerRig) -> None:
    for number in range(1, 40):
        expected = "s" if number == 1 else f"s.{number}"
        before = {1: "s", 2: "s"}.get(number, f"s.{number - 1}")
        assert name_of(rig) == expected
        assert name_of(rig, for_reward=True) == before
        rig.call(expected, identified_by="body")
        assert name_of(rig) == name_of(rig, for_reward=True) == expected
        rig.abort(expected)


def test_tenants_that_use_one_name_mean_two_episodes(rig: LedgerRig) -> None:
    assert name_of(rig, tenant="a") == "s@a"
    rig.begin("s@a", tenant="a")
    assert name_of(rig, tenant="a") == "s@a"
    assert name_of(rig, tenant="b") == "s@b"
    rig.begin("s@b", tenant="other")
    assert name_of(rig, tenant="b") == name_of(rig, tenant="b", for_reward=True) == "s@b.2", "somebody else has the id"


USED = st.tuples(st.text("a@.1é", min_size=1, max_size=4) | st.text(min_size=1), st.sampled_from(("", "a", "a@a", "1")))


@given(USED, USED)
@example(("x@a", "b"), ("x", "a@b"))
@example(("al@acme", ""), ("al", "acme"))
@example((base_of("é", ""), ""), ("é", ""))
def test_every_name_of_a_tenant_stands_for_a_valid_id_and_no_two_for_one(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    first = name_of(LedgerRig(), *one)
    assert first == name_of(LedgerRig(), *one) == check_id(first)
    assert (first == name_of(LedgerRig(), *other)) == (one == other)


def test_a_name_that_is_too_long_for_an_id_is_not_searched_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body's may have millions of characters."""
    searched: list[str] = []
    numbered = session_names._NUMBERED

    class Seen:
        def fullmatch(self, text: str) -> re.Match[str] | None:
            searched.append(text)
            return numbered.fullmatch(text)

    monkeypatch.setattr(session_names, "_NUMBERED", Seen())
    assert name_of(LedgerRig(), "1." * 1000).startswith("name-")
    assert name_of(LedgerRig(), "s.2").startswith("name-")
    assert searched and max(map(len, searched)) < 100


@pytest.mark.parametrize("name", ["a" * 199 + "b", "ajet-x", "é", "\ud800"])
def test_a_name_that_is_no_id_stands_for_one_all_the_same(rig: LedgerRig, name: str) -> None:
    first = name_of(rig, name, tenant="t")
    rig.begin(first, tenant="t")
    rig.abort(first)
    second = name_of(rig, name, tenant="t")
    assert first != second and first.startswith("name-") and second.startswith("name-")


def ended(name: str) -> Episode:
    return blank(episode=name, identified_by="body", state="discarded")


def test_a_name_is_found_again_when_its_first_episodes_are_gone_from_the_archive() -> None:
    archived = {name: ended(name) for name in ("s.5", "s.6", "s.7")}
    last = blank(episode="s.8", identified_by="body")
    names, known = SessionNames([archived["s.7"], last]), archived | {"s.8": last}
    for for_reward in (False, True):
        assert names.current("s", "", known.get, for_reward=for_reward) == "s.8"
    last.state = "ready"
    assert names.current("s", "", known.get, for_reward=False) == "s.9"
    assert names.current("s", "", known.get, for_reward=True) == "s.8"
    names.left("s.7")
    assert names.current("s", "", known.get, for_reward=True) == "s.8"
    names.left("s.8")
    assert names.current("s", "", known.get, for_reward=False) == "s", "whatever is archived of it is over"
    known["s"] = blank(episode="s", identified_by="body")
    names.opened("s")
    known["s.2"] = ended("s.2")
    assert names.current("s", "", known.get, for_reward=False) == "s"


def test_only_names_of_sessions_are_followed() -> None:
    for way, episode in (("path", "s"), ("harness", "s.3")):
        known = {"s.3": blank(episode="s.3", identified_by=way)}
        names = SessionNames([blank(episode="s.3", identified_by=way)])
        assert names.current("s", "", known.get, for_reward=False) == episode


def test_an_episode_that_a_client_called_like_a_later_one_is_none_of_the_name(rig: LedgerRig) -> None:
    rig.call("s", identified_by="body")
    rig.call("s.2", identified_by="path")
    rig.open("s.3")
    assert name_of(rig) == "s"
    rig.abort("s")
    assert (name_of(rig), name_of(rig, for_reward=True)) == ("s.4", "s")
    rig.call("s.4", identified_by="body")
    assert name_of(rig) == name_of(rig, for_reward=True) == "s.4"


def test_a_name_that_looks_like_the_second_episode_of_another_is_its_own(rig: LedgerRig) -> None:
    one, other = name_of(rig, "v1.2"), name_of(rig, "v1")
    known = {name: blank(episode=name, identified_by="body") for name in (one, other)}
    names = SessionNames(known.values())
    assert names.current("v1.2", "", known.get, for_reward=False) == one
    assert names.current("v1", "", known.get, for_reward=False) == other == "v1"


def test_a_path_s_name_goes_on_in_its_own_parts_alone(rig: LedgerRig) -> None:
    def latest(*, for_reward: bool = False) -> str:
        names = SessionNames(rig.state.episodes.values())
        return names.latest("s", "", rig.state.episodes.find, for_reward=for_reward, parts=True)

    rig.call("s", traffic="chat")
    assert latest() == "s"
    rig.abort("s")
    assert (latest(), latest(for_reward=True)) == ("s~2", "s")
    rig.call("s.2", traffic="chat")  # another chat, by its own path
    assert latest() == "s~2"
    rig.call("s~2", traffic="chat", first="s")
    assert latest() == "s~2"
    rig.call("by its history", traffic="chat", first="s", identified_by="lineage")
    assert latest() == "s~2"
    rig.abort("s~2")
    assert latest() == "s~3"
