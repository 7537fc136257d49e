"""Requests by the hundred through the real proxy, each timed at an engine's idle close (`make idle-close`: 10,000)."""

from __future__ import annotations

from pathlib import Path

from tests.bench import idle_close

ROUNDS = (300, 1000, 1000, 1000, 1000)
"""Requests a round, until one of a round met the moment: of 300 a few do, or none on a busy machine; of 1000 dozens."""


async def test_no_request_is_lost_or_doubled_when_the_engine_closes_as_it_is_sent(tmp_path: Path) -> None:
    met = 0
    for number, requests in enumerate(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = await idle_close.run(requests, folder)
        assert found.requests >= requests
        assert found.good, found
        met += found.retries
        if met:
            break
    assert met, "no request met the moment: nothing was shown"
