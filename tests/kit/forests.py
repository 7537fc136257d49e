"""The mask of a forest as a matrix, which the product never makes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dense(exit_: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask ``[N, N]``: which token (row) sees which (column)."""
    place = np.arange(len(exit_))
    return (place[None, :] <= place[:, None]) & (place[:, None] < exit_[None, :])
