"""Requests by the hundred through the real proxy, each timed at an engine's idle close (`make idle-close`: 10,000)."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bench import idle_close

ROUNDS = (300, *[1000] * 40)
"""Requests a round, until one of a round met the moment: of 300 a few do, or none on a busy machine; of 1000 dozens."""
PROXY = f"""#!{sys.executable}
from ajet_proxy import cli
from ajet_proxy.io.engines import upstream
upstream.AT_ONCE_S = 300.0
cli.main()
"""
"""The proxy, which may stand still for a while between a request and the news that its connection was closed."""


async def test_no_request_is_lost_or_doubled_when_the_engine_closes_as_it_is_sent(tmp_path: Path) -> None:
    met, program = 0, tmp_path / "ajet-proxy"
    program.write_text(PROXY)
    program.chmod(0o755)
    for number, requests in enumerate(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = await idle_close.run(requests, folder, program)
        assert found.requests >= requests
        assert found.good, found
        met += found.retries
        if met:
            break
    assert met, "no request met the moment: nothing was shown"
