"""300 requests through the real proxy, each timed at the engine's idle close; `make idle-close` sends 10,000."""

from __future__ import annotations

from pathlib import Path

from tests.bench import idle_close


async def test_no_request_is_lost_or_doubled_when_the_engine_closes_as_it_is_sent(tmp_path: Path) -> None:
    found = await idle_close.run(300, tmp_path)
    assert found.requests >= 300
    assert found.good, found
