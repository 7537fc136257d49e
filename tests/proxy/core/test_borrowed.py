"""Which episode a borrowed name stands for, as episodes under it open and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.borrowed import current
from ajet_proxy.core.episode import Episode
from ajet_sdk.routes import check_id
from tests.kit.ledger_rig import LedgerRig


def name_of(rig: LedgerRig, name: str = "s", tenant: str = "", *, for_reward: bool = False) -> str:
    asked: list[str] = []

    def find(episode: str) -> Episode | None:
        asked.append(episode)
        return rig.ledger.find(episode)

    found = current(name, tenant, find, for_reward=for_reward)
    assert len(asked) < 20
    return found


def test_a_call_goes_to_the_open_episode_or_to_the_next_and_a_reward_to_the_latest() -> None:
    rig = LedgerRig()
    for number in range(1, 40):
        expected = "s" if number == 1 else f"s.{number}"
        before = {1: "s", 2: "s"}.get(number, f"s.{number - 1}")
        assert name_of(rig) == expected
        assert name_of(rig, for_reward=True) == before
        rig.call(expected)
        assert name_of(rig) == name_of(rig, for_reward=True) == expected
        rig.abort(expected)


def test_tenants_that_use_one_name_mean_two_episodes() -> None:
    rig = LedgerRig()
    assert name_of(rig, tenant="a") == "s@a"
    rig.begin("s@a", tenant="a")
    assert name_of(rig, tenant="a") == "s@a"
    assert name_of(rig, tenant="b") == "s@b"
    rig.begin("s@b", tenant="other")
    assert name_of(rig, tenant="b") == name_of(rig, tenant="b", for_reward=True) == "s@b.2", "somebody else has the id"


@given(st.text(min_size=1), st.sampled_from(("", "t")))
def test_every_name_stands_for_a_valid_id_and_no_two_for_one(name: str, tenant: str) -> None:
    first = name_of(LedgerRig(), name, tenant)
    assert first == name_of(LedgerRig(), name, tenant) == check_id(first)
    assert first != name_of(LedgerRig(), name + "x", tenant)


@pytest.mark.parametrize("name", ["a" * 199 + "b", "ajet-x", "é", "\ud800"])
def test_a_name_that_is_no_id_stands_for_one_all_the_same(name: str) -> None:
    rig = LedgerRig()
    first = name_of(rig, name, tenant="t")
    rig.begin(first, tenant="t")
    rig.abort(first)
    second = name_of(rig, name, tenant="t")
    assert first != second and first.startswith("name-") and second.startswith("name-")
