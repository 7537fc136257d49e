from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.sample import BatchEpisode, Group
from ajet_trainer.advantage import compared, one_row_a_session, row_weights, session_of
from tests.trainer.making import duel, episode

CALL, AGENT = {"value": 0.5, "call": "e/1/c0"}, {"value": 1.0, "agent": "solver"}


def with_rewards(one: BatchEpisode, given: Mapping[str, Any], *rewards: float | None) -> BatchEpisode:
    """`one` with its samples' `rewards`, of which one was `given`."""
    samples = zip(one.samples, rewards, strict=True)
    return replace(one, rewards=(given,), samples=tuple(replace(sample, reward=value) for sample, value in samples))


def rewards_of(*episodes: BatchEpisode) -> list[list[tuple[float, int]]]:
    """For each set the sessions' rewards, and how many samples they have."""
    return [
        [(session.reward, len(session.samples)) for session in sessions]
        for sessions in compared(Group("t", tuple(episodes)))
    ]


def test_an_episode_is_one_session_unless_its_rewards_are_apart() -> None:
    plain, other = episode("e", 0.5, samples=3), episode("f", 0.0)
    assert rewards_of(plain, other) == [[(0.5, 3), (0.0, 1)]]
    split = with_rewards(plain, CALL, 1.0, 1.5, 1.0)
    assert rewards_of(split, other) == [[(1.0, 2), (1.5, 1), (0.0, 1)]]
    assert rewards_of(with_rewards(plain, CALL, None, 0.5, None), other) == [[(0.5, 1), (0.0, 1)]]


def given_to(calls: Sequence[str], values: Sequence[float], samples: int) -> BatchEpisode:
    """An episode that got 1.0 for the whole and `values` for `calls`; what each sample has of them is added up."""
    one = episode("e", 1.0, samples=samples, turns=2)
    of_calls: list[Any] = [{"value": value, "call": call} for call, value in zip(calls, values, strict=True)]
    rewards = ({"value": 1.0}, *of_calls)
    made = [replace(sample, reward=sum(item["value"] for item in rewards if item.get("call", sample.calls[0])
                                       in sample.calls)) for sample in one.samples]  # fmt: skip
    return replace(one, rewards=rewards, samples=tuple(made))


CALLS = st.lists(st.sampled_from([f"e/{s}/c{c}" for s in range(4) for c in range(2)]), min_size=1, unique=True)


@given(CALLS, st.data())
def test_sessions_are_told_apart_by_what_was_rewarded(calls: list[str], data: st.DataObject) -> None:
    """And never by how much: no rounding of a reward makes a session, and two calls that got the same are two."""
    values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 0.5 + 1e-9]), min_size=len(calls), max_size=len(calls)))
    (sessions,) = compared(Group("t", (given_to(calls, values, 4),)))
    alone = len({call.split("/c")[0] for call in calls})
    sizes = [1] * alone + [4 - alone] * (alone < 4)
    assert sorted(len(session.samples) for session in sessions) == sorted(sizes)
    for session in sessions:
        assert {sample.reward for sample in session.samples} == {session.reward}


def test_a_reward_that_a_later_one_took_back_makes_no_session() -> None:
    one = episode("e", samples=2)
    final = ({"value": 0.5, "call": "e/1/c0", "final": True}, {"value": 1.0, "final": True})
    made = replace(one, rewards=final, samples=tuple(replace(sample, reward=1.0) for sample in one.samples))
    assert rewards_of(made) == [[(1.0, 2)]]
    kept = replace(made, rewards=final[::-1])
    assert [len(session.samples) for session in compared(Group("t", (kept,)))[0]] == [1, 1]


def test_an_agent_is_compared_with_itself_where_every_agent_can_be() -> None:
    assert rewards_of(duel("a", 1.0), duel("b", 0.5)) == [[(1.0, 1), (0.5, 1)], [(-1.0, 1), (-0.5, 1)]]
    lone = with_rewards(episode("e"), AGENT, 0.25)
    assert rewards_of(duel("a", 1.0), lone) == [[(1.0, 1), (-1.0, 1), (0.25, 1)]]
    twice = with_rewards(episode("f", samples=2), {"value": 0.25, "call": "f/1/c0"}, 0.5, 0.75)
    assert len(rewards_of(twice, lone)) == 1
    assert rewards_of(twice) == [[(0.5, 1), (0.75, 1)]]


def test_the_last_row_of_each_session_stands_for_it_in_any_order() -> None:
    keys = ["g_1_1", "g_0_0", "g_1_0", "g_10_2", "g_10_10"]
    rows, places = one_row_a_session(keys)
    assert [keys[row] for row in rows] == ["g_1_1", "g_0_0", "g_10_10"]
    assert [keys[rows[place]] for place in places] == ["g_1_1", "g_0_0", "g_1_1", "g_10_10", "g_10_10"]


def test_token_means_and_unsplit_batches_need_no_weights() -> None:
    assert row_weights("token-mean", ["g_0_0", "g_0_1"], [3, 4], [3, 4]) is None
    assert row_weights("seq-mean-token-sum", ["g_0_0", "g_1_0"], [3, 4], [3, 0]) is None
    assert row_weights("seq-mean-token-mean", ["pad_0_0"], [0], [0]) is None


episodes = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=6)


@given(episodes, st.integers(0, 3), st.sampled_from(["seq-mean-token-mean", "seq-mean-token-sum"]))
def test_an_episode_weighs_the_same_however_it_splits(sizes: list[list[int]], padding: int, mode: str) -> None:
    """The loss over rows, with a loss of 1 a token, equals the loss over the same episodes in one row each."""
    keys = [f"g_{e}_{i}" for e, rows in enumerate(sizes) for i in range(len(rows))]
    counts = [count for rows in sizes for count in rows]
    keys += [f"pad_{i}_0" for i in range(padding)]
    counts += [0] * padding
    weights = row_weights(mode, keys, counts, counts)
    factors = np.ones(len(keys)) if weights is None else weights
    per_row = np.sign(counts) if mode == "seq-mean-token-mean" else np.asarray(counts)
    loss = float((factors * per_row).sum() / len(keys))
    whole = [1.0 if mode == "seq-mean-token-mean" else float(sum(rows)) for rows in sizes]
    assert loss == pytest.approx(sum(whole) / len(whole), rel=1e-5)
    shares = [
        sum(f * p for f, p, k in zip(factors, per_row, keys, strict=True) if session_of(k) == f"g_{e}")
        for e in range(len(sizes))
    ]
    assert shares == pytest.approx([w * len(keys) / len(sizes) for w in whole], rel=1e-5)


def test_what_is_taken_from_one_session_changes_the_weight_of_no_other() -> None:
    keys, sampled = ["g_0_0", "g_0_1", "g_1_0", "g_2_0"], [2, 6, 5, 5]
    for mode, shares in (("seq-mean-token-mean", [0.25, 0.75, 1, 1]), ("seq-mean-token-sum", [1, 1, 1, 1])):
        for kept in (sampled, [2, 6, 0, 5]):
            weights = row_weights(mode, keys, sampled, kept)
            assert weights is not None
            assert [w for w, count in zip(weights, kept, strict=True) if count] == pytest.approx(
                [4 / 3 * share for share, count in zip(shares, kept, strict=True) if count]
            )
    weights = row_weights("seq-mean-token-mean", keys, sampled, [0, 6, 5, 5])
    assert weights is not None and weights.tolist() == pytest.approx([0, 4 / 3, 4 / 3, 4 / 3])
