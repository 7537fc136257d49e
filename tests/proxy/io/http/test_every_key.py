"""Every LLM route with every kind of key: who is refused reaches no engine, no episode, and learns nothing.

The control routes are gone through in the same way in `test_control`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.io.http import keyring
from tests.kit.engine_stub import EngineStub
from tests.proxy.io.control.test_routes import KINDS, REVOKED, SECRET, key_of
from tests.proxy.serving import CHAT, Client, identity_holds, serving

CAPTURED: dict[str, Any] = {
    "/v1/chat/completions": CHAT, "/v1/completions": {"model": "stub", "prompt": "Hello"},
    "/v1/responses": {"model": "stub", "input": "Hello"},
    "/v1/messages": CHAT,
}
PASSED: dict[str, Any] = {
    "/v1/models": None, "/v1/embeddings": {"model": "stub", "input": "x"}, "/v1/messages/count_tokens": CHAT,
    "/health": None, "/version": None, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]},
}
NEVER = ("/pause", "/v1/load_lora_adapter", "/collective_rpc", "/reset_prefix_cache", "/nothing")
REWARD = {"X-AJet-Reward": "0.5"}


def expected(kind: str, *, open_mode: bool) -> int | None:
    """The refusal that `kind` meets where it names an episode of tenant "a", or None where it may pass."""
    if kind in ("forged", "expired", "revoked") or (kind in ("none", "foreign") and not open_mode):
        return 401
    refused = ("trainer", "operator", "judge", "agent of another episode", "agent of another tenant")
    return 403 if kind in refused else None


@pytest.mark.parametrize("mode", ["open", "locked"])
@pytest.mark.parametrize("path", [*CAPTURED, *PASSED])
async def test_every_llm_route_with_every_key(path: str, mode: str, tmp_path: Path) -> None:
    keyring.revoke(tmp_path, "tenant", REVOKED, time.time())
    secret = SECRET if mode == "locked" else None
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), admin_secret=secret) as client:
        for kind in KINDS:
            for way in ("path", "header"):
                for reward in ({}, REWARD):
                    await try_key(client, stub, path, kind, way, reward, open_mode=mode == "open")
        status = await client.control("GET", "/status", key=client.key(Claims("admin")))
        assert identity_holds(status.json)


async def try_key(
    client: Client, stub: EngineStub, path: str, kind: str, way: str, reward: dict[str, str], *, open_mode: bool
) -> None:
    owner, admin = client.key(Claims("agent", "a")), client.key(Claims("admin"))
    episode = await client.open({"task": "t"}, key=owner)
    key, before = key_of(client, kind, episode), len(stub.requests)
    body = CAPTURED.get(path, PASSED.get(path))
    prefix, named = (f"/e/{episode}", {}) if way == "path" else ("", {"X-AJet-Episode": episode})
    answer = await client.ask("GET" if body is None else "POST", prefix + path, body, key=key, **named, **reward)
    wanted = expected(kind, open_mode=open_mode)
    record = await client.record(episode, key=admin)
    if wanted is None:
        assert answer.status not in (401, 403, 500), (kind, way, answer.body)
        assert bool(record["calls"]) == (path in CAPTURED), (kind, way)
        assert bool(record["rewards"]) == bool(reward), (kind, way)
        return
    if kind == "agent of another episode" and way == "header":
        wanted = wanted_by_key(path, reward)  # its key names an episode before any header does
    assert wanted is None or answer.status == wanted, (kind, way, answer.body)
    assert (record["calls"], record["rewards"]) == ([], []), (kind, way)
    if wanted is not None:
        assert len(stub.requests) == before, (kind, way)
        assert key is None or key.encode() not in answer.body
        assert SECRET.encode() not in answer.body


def wanted_by_key(path: str, reward: dict[str, str]) -> int | None:
    """The status that the key meets of an episode that is gone: captured calls and rewards need it."""
    return 404 if path in CAPTURED or reward else None


@pytest.mark.parametrize("path", NEVER)
async def test_no_key_reaches_the_engines_control(path: str, tmp_path: Path) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), admin_secret=SECRET) as client:
        for kind in KINDS:
            for method in ("GET", "POST"):
                for prefix in ("", "/e/ep"):
                    answer = await client.ask(method, prefix + path, {}, key=key_of(client, kind, "ep"))
                    assert answer.status == 404, (kind, method, path)
        assert stub.requests == []
