from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_trainer.advantage import one_row_a_session, row_weights, session_of


def test_the_last_row_of_each_session_stands_for_it_in_any_order() -> None:
    keys = ["g_1_1", "g_0_0", "g_1_0", "g_10_2", "g_10_10"]
    rows, places = one_row_a_session(keys)
    assert [keys[row] for row in rows] == ["g_1_1", "g_0_0", "g_10_10"]
    assert [keys[rows[place]] for place in places] == ["g_1_1", "g_0_0", "g_1_1", "g_10_10", "g_10_10"]


def test_token_means_and_unsplit_batches_need_no_weights() -> None:
    assert row_weights("token-mean", ["g_0_0", "g_0_1"], [3, 4]) is None
    assert row_weights("seq-mean-token-sum", ["g_0_0", "g_1_0"], [3, 4]) is None
    assert row_weights("seq-mean-token-mean", ["pad_0_0"], [0]) is None


episodes = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=6)


@given(episodes, st.integers(0, 3), st.sampled_from(["seq-mean-token-mean", "seq-mean-token-sum"]))
def test_an_episode_weighs_the_same_however_it_splits(sizes: list[list[int]], padding: int, mode: str) -> None:
    """The loss over rows, with a loss of 1 a token, equals the loss over the same episodes in one row each."""
    keys = [f"g_{e}_{i}" for e, rows in enumerate(sizes) for i in range(len(rows))]
    counts = [count for rows in sizes for count in rows]
    keys += [f"pad_{i}_0" for i in range(padding)]
    counts += [0] * padding
    weights = row_weights(mode, keys, counts)
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
