"""Credit by turn: what each call of a session is given, by hand, by GRPO, and however episodes come apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_sdk.sample import BatchEpisode, Group
from ajet_trainer.admission import admit
from ajet_trainer.batch import to_rows
from ajet_trainer.sampling import Rule
from ajet_trainer.turns import (
    ByTurn,
    TurnReward,
    TurnSession,
    credit,
    has_signal,
    returns_to_go,
    spread,
    turn_sessions,
    widened,
)
from tests.trainer.making import batch, duel, episode, sample

RAW = ByTurn(scaled=False)


def played(
    name: str, values: Sequence[float], *, whole: float = 0.0, states: Sequence[str | None] = (), **how: Any
) -> BatchEpisode:
    """An episode of one timeline that got `whole`, and whose calls got `values`."""
    one = replace(sample(f"{name}/0", turns=len(values), **how), reward=whole + sum(values))
    named = [*states, *[None] * (len(values) - len(states))]
    rewards = [
        {"value": value, "final": False, "call": call} | ({} if state is None else {"state": state})
        for call, value, state in zip(one.calls, values, named, strict=True)
    ]
    given = ({"value": whole, "final": True}, *rewards)
    return BatchEpisode(name, "t", "policy", whole + sum(values), given, (one,))


def split(one: BatchEpisode) -> BatchEpisode:
    """`one` with a sample for each call, in an order that is not theirs."""
    (talk,) = one.samples
    parts = [
        replace(
            talk, sample=f"{talk.sample}.{turn}", token_ids=talk.token_ids[:end],
            loss_mask=(0,) * start + (1,) * (end - start), logprobs=(0.0,) * start + talk.logprobs[start:end],
            policy_versions=((0, end - start),), calls=(call,), spans=((call, start, end),), turns=(turn,),
            sampling=(), finish_reasons=("stop",),
            reward=sum(item["value"] for item in one.rewards if item.get("call", call) == call),
        )
        for turn, (call, start, end) in enumerate(talk.spans)
    ]  # fmt: skip
    return replace(one, samples=tuple(parts[::-1]))


def found(*episodes: BatchEpisode, how: ByTurn = RAW) -> list[list[float]]:
    """The advantages of the calls of each session, in the order in which they began, over all sets."""
    return [
        [calls[turn.call] for turn in play.turns]
        for mine in turn_sessions(Group("t", tuple(map(widened, episodes))))
        for play, calls in zip(mine, credit(mine, how), strict=True)
    ]


def test_returns_are_what_is_still_to_come() -> None:
    assert returns_to_go([1.0, 0.0, 2.0], 1.0) == [3.0, 2.0, 2.0]
    assert returns_to_go([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert returns_to_go([1.0, 0.0, 2.0], 0.0) == [1.0, 0.0, 2.0]
    assert returns_to_go([], 1.0) == []


def test_when_a_call_was_rewarded_makes_a_difference() -> None:
    """Summed over a timeline the two would be alike."""
    early, late = played("a", [1, 0, 0, 0]), played("b", [0, 0, 0, 1])
    assert found(early, late) == [[0, -0.5, -0.5, -0.5], [0, 0.5, 0.5, 0.5]]
    assert found(early, late, how=ByTurn(0.0, scaled=False)) == [[0.5, 0, 0, -0.5], [-0.5, 0, 0, 0.5]]


def test_the_whole_episode_s_reward_counts_for_each_of_its_calls() -> None:
    assert found(played("a", [1, 0], whole=3), played("b", [0, 0], whole=1)) == [[1.5, 1.0], [-1.5, -1.0]]


def test_a_state_is_compared_with_itself_where_several_episodes_were_in_it() -> None:
    """The first calls are both in the hall. Only one episode was in the cellar, so its turn is what is left."""
    one = played("a", [1, 0], states=["hall", "cellar"])
    other = played("b", [0, 4, 0], states=["attic", "hall"])
    # returns: 1 0 and 4 4 0; the hall: 1 and 4, the first turn: 1 and 4, the second: 0 and 4
    assert found(one, other) == [[1 - 2.5, 0 - 2], [4 - 2.5, 4 - 2.5, 0 - 2]]
    twice = played("c", [0, 0], states=["cellar", "cellar"])
    assert found(twice, played("d", [2, 2], states=["x"])) == [[-2, -1], [2, 1]], "of one episode alone it is no anchor"


def test_a_turn_that_one_episode_reached_is_compared_with_the_last_that_several_did() -> None:
    short, long = played("a", [2]), played("b", [0, 0, 6, 5])
    # the first turn: 2 and 11
    assert found(short, long) == [[2 - 6.5], [11 - 6.5, 11 - 6.5, 11 - 6.5, 5 - 6.5]]


def test_a_session_without_another_has_no_advantage() -> None:
    assert found(played("a", [1, 2], whole=1), how=ByTurn()) == [[0, 0]]


def test_a_state_is_named_by_a_reward_of_nothing() -> None:
    """And the last word on it counts."""
    one, other = played("a", [0], states=["x"], whole=1), played("b", [0], states=["y"])
    said = {"value": 0.0, "call": "b/0/c0", "state": "x"}
    ((first, second),) = turn_sessions(Group("t", (one, replace(other, rewards=(*other.rewards, said)))))
    assert (first.turns[0].state, second.turns[0].state) == ("x", "x")


@pytest.mark.parametrize("how", [ByTurn(), ByTurn(scaled=False), ByTurn(0.5)])
def test_no_advantage_depends_on_how_an_episode_came_apart(how: ByTurn) -> None:
    told = [played("a", [1, 0, 0.5], whole=2), played("b", [0, 0, 1]), played("c", [0.25, 1], whole=1)]
    assert found(*map(split, told), how=how) == found(*told, how=how)


GIVEN = st.lists(
    st.tuples(
        st.integers(-4, 4).map(float), st.booleans(), st.sampled_from([None, "c0", "c1"]), st.sampled_from([None, "a"]),
        st.sampled_from([None, "m"]),
    ), min_size=1, max_size=8,
)  # fmt: skip


@given(GIVEN)
def test_a_session_gets_what_the_proxy_says_it_got(
    given: list[tuple[float, bool, str | None, str | None, str | None]],
) -> None:
    """Final rewards included, which replace earlier ones."""
    rewards = [
        EpisodeReward(f"r{n}", v, call, agent, f, None, 0.0, model=model)
        for n, (v, f, call, agent, model) in enumerate(given)
    ]
    expected = total(rewards)
    one = replace(sample("e/0", turns=2), agent="a", calls=("c0", "c1"), reward=expected)
    spans = tuple((call, start, end) for call, (_, start, end) in zip(one.calls, one.spans, strict=True))
    given_so = tuple(reward.to_json() for reward in rewards)
    made = BatchEpisode("e", "t", "m", expected or 0.0, given_so, (replace(one, spans=spans),))
    for mine in turn_sessions(Group("t", (made, made))):
        assert [play.total for play in mine] == [expected] * 2


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6), st.booleans())
def test_with_whole_rewards_alone_it_is_grpo(rewards: list[float], scaled: bool) -> None:
    """In doubles; `test_by_turn` compares it with verl's own. Turns change nothing, nor do agents."""
    episodes = [episode(f"e{n}", reward, samples=1 + n % 2, turns=1 + n) for n, reward in enumerate(rewards)]
    mean, deviation = float(np.mean(rewards)), float(np.std(rewards, ddof=1))
    for name, values in enumerate(found(*episodes, how=ByTurn(scaled=scaled))):
        expected = (rewards[name] - mean) / (deviation + 1e-6 if scaled else 1.0)
        assert values == pytest.approx([expected] * len(values), rel=1e-6, abs=1e-6)


def test_the_scale_is_that_of_sessions_and_not_of_calls() -> None:
    one, other = played("a", [1, 0, 0, 0]), played("b", [0, 0, 0, 1])
    plain, scaled = found(one, other), found(one, other, how=ByTurn())
    scale = math.sqrt(sum(sum(value**2 for value in values) / 4 for values in plain) / 1) + 1e-6
    assert np.array(scaled) == pytest.approx(np.array(plain) / scale)


def test_an_agent_is_held_against_itself() -> None:
    """A session is what one agent did; each agent's own rewards are those of all its calls."""
    proposers = [1.0, 0.5, -0.75]
    assert found(*(duel(f"e{n}", reward) for n, reward in enumerate(proposers))) == [
        *([reward - 0.25] for reward in proposers), *([0.25 - reward] for reward in proposers)
    ]


def two_agents(name: str) -> BatchEpisode:
    """One of two agents has a call that was rewarded, and another sample."""
    rewarded, other, idle = (sample(f"{name}/{n}") for n in range(3))
    samples = (
        replace(rewarded, agent="a", reward=1.0, turns=(1,)), replace(other, agent="a", turns=(0,)),
        replace(idle, agent="b", turns=(0,)),
    )
    return BatchEpisode(name, "t", "m", 1.0, ({"value": 1.0, "call": rewarded.calls[0]},), samples)


def test_all_calls_of_an_agent_that_was_rewarded_are_trained_and_none_of_another() -> None:
    """The earlier call helped to the later one's reward."""
    one, other = two_agents("x"), two_agents("y")
    rewards = ({"value": 0.0, "call": other.rewards[0]["call"]},)
    admission = admit(batch("b", Group("t", (one, replace(other, rewards=rewards)))), Rule(by_turn=RAW))
    rows = to_rows("b", admission.groups, by_turn=RAW)
    assert {row.spans[0][0] for row in rows} == {"x/0/c0", "x/1/c0", "y/0/c0", "y/1/c0"}
    assert [set(row.advantages.tolist()) for row in rows if row.advantages is not None] == [
        {0.5}, {0.5}, {-0.5}, {-0.5}
    ]
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert len(to_rows("b", admit(batch("b", Group("t", (one, other)))).groups)) == 2


def test_a_token_has_the_advantage_of_the_call_that_sampled_it() -> None:
    values: Mapping[str, float] = {"a": 0.5, "b": -1.0}
    assert spread(values, [("a", 0, 2), ("b", 4, 5)], 6).tolist() == [0.5, 0.5, 0, 0, -1.0, 0]
    early, late = played("a", [1, 0]), played("b", [0, 1])
    rows = to_rows("b", [Group("t", (early, late))], by_turn=RAW)
    for row, second in zip(rows, (-0.5, 0.5), strict=True):
        assert row.advantages is not None and row.advantages.dtype == np.float32
        assert row.advantages.tolist() == [0, 0, 0, 0, 0, second, second, second]
    assert all(row.advantages is None for row in to_rows("b", [Group("t", (early, late))]))


def test_a_signal_is_an_advantage_of_some_call() -> None:
    """Equal sums hide one, and different rewards are none where nothing is left of them."""
    early, late = played("a", [1, 0]), played("b", [0, 1])
    assert has_signal(Group("t", (early, late)), RAW)
    assert not has_signal(Group("t", (early, replace(early, episode="c"))), ByTurn())
    group = Group("t", (early, late))
    assert not admit(batch("b", group), Rule(no_signal="drop")).groups
    assert admit(batch("b", group), Rule(no_signal="drop", by_turn=RAW)).groups
    rejected = admit(batch("b", Group("t", (early, played("c", [1, 0])))), Rule(no_signal="drop", by_turn=RAW)).rejected
    assert {(one.reason, one.detail) for one in rejected} == {("no_signal", "all advantages of task t are 0")}


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=7).filter(lambda values: len(values) > 1), st.integers(1, 3))
def test_rounding_is_no_signal(values: list[float], turns: int) -> None:
    """Equal rewards leave nothing, whatever their sum rounds to."""
    got = tuple(TurnReward(f"c{k}", value) for k, value in enumerate(values))
    twins = [TurnSession(values[0] / 3, (), f"e{n}", got) for n in range(3)]
    assert {value for calls in credit(twins * turns, ByTurn()) for value in calls.values()} == {0.0}
