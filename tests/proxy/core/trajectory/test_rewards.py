"""The sum of rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.trajectory.rewards import EpisodeReward, total

given_rewards = st.lists(
    st.builds(
        EpisodeReward, st.uuids().map(str), st.floats(-2, 2), st.none(), st.none(), st.booleans(), st.none(),
        st.just(0.0)
    ), max_size=6,
)


@given(given_rewards)
def test_the_last_final_reward_corrects_those_before(rewards: list[EpisodeReward]) -> None:
    finals = [reward.value for reward in rewards if reward.final]
    others = [reward.value for reward in rewards if not reward.final]
    expected = None if not rewards else sum(others) + (finals[-1] if finals else 0.0)
    assert total(rewards) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("rewards", "expected"), [
    ([("a", 1.0), ("b", -1.0)], 0.0), ([("a", 1.0), ("b", -1.0), ("a", 3.0)], 2.0), ([("a", 1.0), (None, 5.0)], 5.0),
    ([(None, 5.0), ("a", 1.0), ("a", 2.0)], 7.0),
])  # fmt: skip
def test_a_final_reward_of_an_agent_corrects_its_own(rewards: list[tuple[str | None, float]], expected: float) -> None:
    for kind in ("agent", "call", "model"):
        scopes = [{"call": None, "agent": None, kind: name} for name, _ in rewards]
        given = [
            EpisodeReward("r", value, final=True, note=None, at=0.0, **scope)
            for (_, value), scope in zip(rewards, scopes, strict=True)
        ]
        assert total(given) == expected


def test_a_call_has_one_agent_and_need_not_say_which() -> None:
    first = EpisodeReward("r", 1.0, call="c", agent=None, final=True, note=None, at=0.0)
    assert total([first, replace(first, agent="a", value=0.25)]) == 0.25


def test_a_reward_of_an_agent_and_a_model_is_apart_from_that_of_either() -> None:
    given = [
        EpisodeReward("r", value, None, agent, True, None, 0.0, model=model)
        for value, agent, model in ((1.0, "a", None), (2.0, None, "m"), (4.0, "a", "m"), (8.0, "a", "m"))
    ]
    assert total(given) == 11.0


def test_a_reward_as_json_has_what_it_was_given() -> None:
    short = EpisodeReward("r", 1.0, None, None, True, None, 5.0)
    assert short.to_json() == {"id": "r", "value": 1.0, "final": True, "at": 5.0}
    full = EpisodeReward("r", 1.0, "c", "a", False, "n", 5.0)
    assert full.to_json() == short.to_json() | {"final": False, "call": "c", "agent": "a", "note": "n"}
    assert replace(full, state="s").to_json() == full.to_json() | {"state": "s"}
    assert replace(short, model="m").to_json() == short.to_json() | {"model": "m"}
