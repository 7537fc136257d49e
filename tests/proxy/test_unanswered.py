"""What the world failed of an episode's attempts is there after a restart, and whatever way its journal was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.io.storage.codec import decode, encode
from ajet_proxy.io.storage.snapshot import pack, unpack
from tests.kit.engine_stub import EngineStub, Fault
from tests.proxy.core.ledger.test_attempts import Story
from tests.proxy.serving import serving


@pytest.mark.parametrize("seed", range(20))
def test_what_is_on_disk_is_what_was_in_memory(seed: int) -> None:
    story = Story(seed)
    steps = [story.begin] * 6 + [story.end] * 6 + [story.take_back, story.turn_away, story.restart]
    for _ in range(30):
        story.dice.choice(steps)()
    episode = story.rig.state.episodes["x"]
    assert unpack(pack(episode)).attempts == episode.attempts
    for event in story.rig.events:
        assert decode(encode(event)) == event


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_restart_forgets_no_loss_and_tells_of_itself(tmp_path: Path, workers: int) -> None:
    """With the trace of a request that never became a call."""
    async def told(client: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await client.control("GET", f"/episodes/{episode}")).json["unanswered"]
        return found

    async with EngineStub() as stub:
        settings: dict[str, Any] = {"upstream": (stub.url,), "workers": workers, "gate_hold_s": 0.1}
        async with serving(tmp_path, **settings) as client:
            episode = (await client.control("POST", "/episodes", {})).json["episode"]
            stub.faults.append(Fault("status", status=503, times=9))
            assert (await client.chat(episode, "one")).status == 503
            stub.faults.clear()
            await client.control("POST", "/gate/close", {})
            assert (await client.chat(episode, "two", X_AJet_Agent="judge")).status == 503
            before = await told(client)
            assert [one["reason"] for one in before] == ["refused", "unserved"]
        async with serving(tmp_path, **settings) as client:
            after = await told(client)
            assert (after[:-1], after[-1]["reason"]) == (before, "away")
            assert before[-1]["at"] <= after[-1]["since"] <= after[-1]["at"]
            await client.control("POST", "/gate/open", {"policy_version": 1})
            assert (await client.chat(episode, "one")).status == 200
            assert [one["reason"] for one in await told(client)] == ["unserved"]
            assert (await client.chat(episode, "two", X_AJet_Agent="judge")).status == 200
            assert await told(client) == []
