"""Ids are of their kind, and no two are alike."""

from __future__ import annotations

import re

from ajet_proxy.io.runtime.clock import DRAWN, Clock


def test_ids_are_never_twice_the_same() -> None:
    clock = Clock()
    ids = {clock.new_id("ep") for _ in range(3 * DRAWN)} | {Clock().new_id("ep")}
    assert len(ids) == 3 * DRAWN + 1
    assert all(re.fullmatch("ep-[0-9a-f]{16}", name) for name in ids)
