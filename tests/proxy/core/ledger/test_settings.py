"""The operator's settings: what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.ledger.settings import LedgerSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"merge_policy": "loose"}, {"drift_limit": 1.5}, {"drift_limit": -0.1}, {"group_size": 0},
        {"idle_timeout": 0.0}, {"wall_timeout": -1.0},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LedgerSettings(**wrong)
