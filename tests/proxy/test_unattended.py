"""A daemon that runs for long: what is over leaves it, and its disk has a limit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ajet_proxy import daemon as app
from ajet_proxy.io.storage import compactor
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import Client, eventually, identity_holds, serving


async def gone(client: Client, episode: str) -> bool:
    return (await client.control("GET", f"/episodes/{episode}")).status == 404


async def test_what_is_too_old_is_removed_however_few_episodes_there_are(
    tmp_path: Path, stub: EngineStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory, journal and archive; what has not ended stays, and so do the sums."""
    monkeypatch.setattr(app, "TICK_S", 0.05)
    monkeypatch.setattr(compactor, "RETAIN_S", 0.5)
    for names in (("a", "b"), ("c", "d")):  # with a restart in between
        async with serving(tmp_path, upstream=(stub.url,), archive_max_age=0.5) as client:
            for name in (*names, "open"):
                await client.chat(name)
            for name in names:
                assert (await client.control("POST", f"/episodes/{name}/abort", {})).status == 200
            for name in names:
                await eventually(partial(gone, client, name))
            assert (await client.control("GET", "/episodes/open")).status == 200
            status = await client.status()
            assert identity_holds(status) and status["episodes"]["open"] == 1
    assert status["episodes"]["discarded"] == status["archived"] == 4
    assert not [path for path in (tmp_path / "journal").glob("*.log") if b"EpisodeDiscarded" in path.read_bytes()]


async def test_a_limit_on_the_disk_keeps_new_work_out(tmp_path: Path) -> None:
    async with serving(tmp_path, max_disk=1) as client:
        refused = await client.control("POST", "/episodes", {})
        assert (refused.status, refused.json["error"]["code"]) == (503, "disk_limit") and refused.headers["Retry-After"]
        status = await client.status()
        assert status["journal"] == {"healthy": True, "refused": {"disk": ["EpisodeOpened", "CallStarted"]}}
        metrics = (await client.ask("GET", "/metrics")).body.decode()
        assert "ajet_intake_open 0" in metrics and 'ajet_refused_total{reason="disk"} 1' in metrics
