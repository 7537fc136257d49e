"""Group-relative advantage is a matter of episodes: one that splits into more timelines weighs no more.

Two places would break this, and this file holds the arithmetic that mends both.

*The baseline.* Most of verl's group-relative estimators see all rows, so an episode with three rows would count three
times in the mean of its group. They are given `one_row_a_session`, and the result is spread over the session's rows.

*The denominator.* A loss that is a mean over tokens does not see how tokens are arranged in rows. A loss that is a mean
over sequences does: `row_weights` scales the advantages so that it becomes a mean over episodes. (The policy losses are
linear in the size of the advantage. A KL or entropy term of such a loss stays a mean over rows.)

Next: ajet_trainer/batch.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def session_of(key: str) -> str:
    """The session part of a row's key ``GROUP_SESSION_INDEX``."""
    return key.rsplit("_", 1)[0]


def one_row_a_session(keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """``(rows, place)``: the last row of each session, and for every row the place of its session in `rows`."""
    last: dict[str, int] = {}
    for position, key in enumerate(keys):
        best = last.get(session_of(key))
        if best is None or _index(keys[best]) < _index(key):
            last[session_of(key)] = position
    places = {session: place for place, session in enumerate(last)}
    return list(last.values()), [places[session_of(key)] for key in keys]


def row_weights(mode: str, keys: Sequence[str], sampled: Sequence[int]) -> NDArray[np.float32] | None:
    """Factors on the advantages, one a row, or None where nothing is to change.

    `mode` is verl's ``loss_agg_mode``; `sampled` counts each row's trained tokens (0 for a row of padding). With these
    factors a mean over rows equals the mean over episodes of what the rows of an episode hold together.
    """
    rows = np.asarray(sampled, dtype=np.float64)
    real = rows > 0
    sessions = [session_of(key) for key in keys]
    episodes = len({session for session, counts in zip(sessions, real, strict=True) if counts})
    if not mode.startswith("seq-mean") or episodes == len(keys) or episodes == 0:
        return None
    weights = np.full(len(keys), len(keys) / episodes)
    if mode == "seq-mean-token-mean":
        totals: dict[str, float] = {}
        for session, count in zip(sessions, rows, strict=True):
            totals[session] = totals.get(session, 0.0) + count
        weights *= [count / (totals[session] or 1.0) for session, count in zip(sessions, rows, strict=True)]
    return weights.astype(np.float32)


def _index(key: str) -> int:
    return int(key.rsplit("_", 1)[1])
