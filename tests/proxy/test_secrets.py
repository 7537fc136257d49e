"""A busy daemon, and then a search for its secrets in everything that it wrote, answered, sent on or showed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.proxy_process import PROXY, ProxyProcess

ADMIN, UPSTREAM = "the operator's own words", "sk-what-the-engine-wants"
CHAT = {"model": "stub", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
MINE = ("secret", "ca/mitmproxy-ca.pem", "ca/mitmproxy-ca.p12")
"""Files that hold a secret because that is what they are for."""


def command(data_dir: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(PROXY), *arguments, "--data-dir", str(data_dir)], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.strip()


async def test_no_secret_is_in_anything_a_daemon_writes_or_says(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    team = command(data_dir, "issue-key", "--scope", "agent", "--tenant", "team")
    gone = command(data_dir, "issue-key", "--scope", "agent", "--tenant", "gone")
    command(data_dir, "rotate-secret")
    command(data_dir, "revoke", "--tenant", "gone")
    env = {"AJET_ADMIN_SECRET": ADMIN, "AJET_UPSTREAM_KEY": UPSTREAM}
    async with EngineStub() as stub:
        with ProxyProcess(stub.url, data_dir, env=env, options=["--intercept", "127.0.0.1:0"]) as proxy:
            said, keys = await be_busy(proxy, stub, team, gone)
            said.append(shown_of(proxy.pid))
            proxy.kill()
            proxy.start()
            async with busy_client(proxy, ADMIN) as client:
                said.append((await client.get("/ajet/v1/episodes")).content)
            assert proxy.stop() == 0
        asked = repr([str(request) for request in stub.requests]).encode()
    raw = (data_dir / "secret").read_bytes()
    halves = [raw[start : start + 32] for start in range(0, len(raw), 32)]
    assert len(halves) == 2
    secrets = [ADMIN.encode(), *(key.encode() for key in (team, gone, *keys)), *halves]
    secrets += [form for half in halves for form in (half.hex().encode(), base64.b64encode(half))]
    files = [path for path in data_dir.rglob("*") if path.is_file() and str(path.relative_to(data_dir)) not in MINE]
    assert {"audit.jsonl", "revoked"} <= {path.name for path in files}
    assert any(path.stat().st_size for path in files if "journal" in str(path))
    written = {path.name: path.read_bytes() for path in (*files, proxy.log)}
    for name, text in (written | {"answers": b"\n".join(said)}).items():
        assert not [secret for secret in (*secrets, UPSTREAM.encode()) if secret in text], name
    assert UPSTREAM.encode() in asked
    assert not [secret for secret in secrets if secret in asked]
    for name in (*MINE, "revoked", "audit.jsonl"):
        assert (data_dir / name).stat().st_mode & 0o077 == 0, name


def shown_of(pid: int) -> bytes:
    """The part of a process that every user of the machine can see."""
    return Path(f"/proc/{pid}/cmdline").read_bytes() if sys.platform == "linux" else b""


def busy_client(proxy: ProxyProcess, key: str) -> httpx.AsyncClient:
    sent = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=proxy.url, headers=sent, trust_env=False, timeout=300)


async def be_busy(proxy: ProxyProcess, stub: EngineStub, team: str, gone: str) -> tuple[list[bytes], list[str]]:
    """Everything a daemon does, well and badly, with keys in every place: what it answered, and the keys it gave."""
    said: list[bytes] = []

    async def ask(key: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response | None:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with busy_client(proxy, key) as client:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.request(method, path, json=body, headers=sent)
                said.append(answer.content + repr(answer.headers).encode())
                return answer
        return None

    given = []
    for number in range(3):
        opened = await ask(team, "POST", "/ajet/v1/episodes", {"task": f"t{number}"})
        assert opened is not None
        said.pop()  # the one answer that is meant to hold a key
        key, episode = opened.json()["api_key"], opened.json()["episode"]
        given.append(key)
        await ask(key, "POST", "/v1/chat/completions", CHAT | {"stream": bool(number % 2)})
        await ask("EMPTY", "POST", f"/e/{key}/v1/chat/completions", CHAT)
        await ask("EMPTY", "GET", f"/e/{key}/v1/models")
        await ask("EMPTY", "GET", f"/e/{key}/nothing/{key}")
        await ask("EMPTY", "POST", "/v1/messages", CHAT, x_api_key=key)
        await ask(key, "GET", f"/ajet/v1/episodes/{key}?tokens=1")
        await ask(key, "POST", "/ajet/v1/episodes/other/rewards", {"value": 1})
        await ask(key, "POST", f"/ajet/v1/episodes/{episode}/rewards", {"value": "x"})
        await ask(key, "POST", f"/ajet/v1/episodes/{episode}/rewards", {"value": number})
    await ask(ADMIN, "GET", "/ajet/v1/status")
    for path in ("/ajet/v1/episodes", "/ajet/v1/overview", "/ajet/v1/nothing", "/metrics", "/ajet/", "/ajet/v1/ca.pem"):
        await ask(ADMIN, "GET", path)
    await ask(gone, "GET", "/ajet/v1/status")
    await ask(team + "x", "POST", "/v1/chat/completions", CHAT, X_AJet_Reward="1")
    await ask(ADMIN, "POST", "/ajet/v1/batches/lease", {"group_size": 1})
    stub.faults += [Fault("reset"), Fault("status"), Fault("cut")]
    for _ in range(3):
        await ask(team, "POST", "/v1/chat/completions", CHAT)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(f"GET /e/{team}/v1/models?\xff HTTP/1.1\r\nAuthorization: Bearer {team}\1\r\n\r\n".encode("latin-1"))
    said.append(await reader.read())
    writer.close()
    return said, given
