from __future__ import annotations

from dataclasses import replace

import numpy as np

from ajet_sdk.sample import Group
from ajet_trainer.batch import group_name, to_row, to_rows
from tests.trainer.making import duel, episode, sample


def test_a_row_splits_at_the_first_sampled_token_and_copies_the_rest() -> None:
    one = replace(sample("e/0", turns=2), policy_versions=((3, 4), (5, 2)))
    row = to_row("g", 1, 0, 0.25, one)
    assert row.prompt.tolist() == [1, 2, 3, 4]
    assert row.response.tolist() == [20, 21, 22, 10, 11, 20, 21, 22]
    assert row.mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
    assert row.logprobs.tolist() == [-0.5, -0.5, -0.5, 0, 0, -0.5, -0.5, -0.5]
    assert (row.prompt.dtype, row.mask.dtype, row.logprobs.dtype) == (np.int64, np.int64, np.float32)
    assert (row.reward, row.turns, row.min_version, row.max_version) == (0.25, 2, 3, 5)
    assert (row.key, row.tokens, row.sampled) == ("g_1_0", 12, 6)
    assert list(row.prompt) + list(row.response) == list(one.token_ids)
    assert [(call, row.response[start:end].tolist()) for call, start, end in row.spans] == [
        (call, [20, 21, 22]) for call in one.calls
    ]


def test_a_row_ends_with_its_last_sampled_token() -> None:
    one = sample("e/0", turns=2)
    shown = len(one.loss_mask)
    longer = replace(
        one, token_ids=(*one.token_ids, 7, 8), loss_mask=(*one.loss_mask, 0, 0), logprobs=(*one.logprobs, 0.0, 0.0)
    )
    row, same = to_row("g", 0, 0, 1.0, longer), to_row("g", 0, 0, 1.0, one)
    assert row.mask[-1] == 1 and row.tokens == shown
    assert row.response.tolist() == same.response.tolist() and row.logprobs.tolist() == same.logprobs.tolist()


def test_rows_are_named_by_group_session_and_sample_and_carry_the_episodes_reward() -> None:
    groups = [Group("t", (episode("a", 1.0, samples=2), episode("b", 0.0))), Group("u", (episode("c", 0.5),))]
    rows = to_rows("batch_1", groups)
    first, second = group_name("batch_1", 0), group_name("batch_1", 1)
    assert [row.key for row in rows] == [f"{first}_0_0", f"{first}_0_1", f"{first}_1_0", f"{second}_0_0"]
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0, 0.5]
    assert "_" not in first + second
    assert first != second
    assert to_rows("batch_1", groups)[0].key == rows[0].key


def test_agents_that_are_rewarded_apart_are_compared_apart() -> None:
    rows = to_rows("b", [Group("t", (duel("a", 1.0), duel("b", -1.0)))])
    first, second = group_name("b", 0, 0), group_name("b", 0, 1)
    assert [(row.key, row.reward) for row in rows] == [
        (f"{first}_0_0", 1.0), (f"{first}_1_0", -1.0), (f"{second}_0_0", -1.0), (f"{second}_1_0", 1.0),
    ]
