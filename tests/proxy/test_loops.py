"""The proxy as its own engine: refused where it is named, and ended at once where it could not be known."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.kit.engine_stub import EngineStub
from tests.kit.ports import free_port
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.proxy.serving import CHAT, Answer, Client, serving

SPELLINGS = ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1")
ROUTES = {
    "/v1/chat/completions": CHAT, "/v1/completions": {"model": "stub", "prompt": "x"},
    "/v1/responses": {"model": "stub", "input": "x"},
    "/v1/messages": {"model": "stub", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]},
    "/v1/embeddings": {"model": "stub", "input": "x"},
}


def _hears_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = _hears_ipv6()


async def announce(client: Client, *urls: str) -> Answer:
    return await client.control("POST", "/policy", {"model": "stub", "version": 1, "upstreams": list(urls)})


async def opened(client: Client) -> int:
    return int((await client.status())["episodes"]["opened"])


def port_of(client: Client) -> str:
    return client.app.url.rpartition(":")[2]


@pytest.mark.parametrize("settings", [{}, {"workers": 2}, {"intercept": ("127.0.0.1:0",)}], ids=str)
async def test_an_own_address_is_no_engine_however_it_is_spelled(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), **settings) as client:
        ports = [port_of(client), *(str(on.address[1]) for on in intercepting(client))]
        for url in [f"http://{host}:{port}{end}" for host in SPELLINGS for port in ports for end in ("", "/v1/")]:
            refused = await announce(client, stub.url, url)
            assert (refused.status, refused.json["error"]["param"]) == (400, "upstreams")
            assert refused.json["error"]["message"] == (
                f"upstream {url!r} is the proxy's own address: give that of the engine"
            )
        assert (await client.status())["models"] == {}
        assert (await announce(client, stub.url)).status == 200


@pytest.mark.skipif(not IPV6, reason="needs IPv6")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("listen", "ours", "other"), [("[::]", "[::1]", "127.0.0.1"), ("0.0.0.0", "127.0.0.1", "[::1]")]
)
async def test_who_listens_everywhere_hears_one_version_of_ip(
    tmp_path: Path, listen: str, ours: str, other: str, workers: int
) -> None:
    """So an engine may be at the same port in the other one."""
    secret = "a secret of the operator"
    async with serving(
        tmp_path, listen=f"{listen}:0", insecure=True, admin_secret=secret, workers=workers
    ) as client:
        port = port_of(client)
        for host, status in ((ours, 400), (other, 200)):
            asked = {"model": "stub", "version": 1, "upstreams": [f"http://{host}:{port}"]}
            assert (await client.control("POST", "/policy", asked, key=secret)).status == status
        async with client.session.get(f"http://{ours}:{port}/ajet/v1/status") as reached:
            assert reached.status == 401
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.session.get(f"http://{other}:{port}/ajet/v1/status")


def intercepting(client: Client) -> Any:
    return () if client.app.interception is None else client.app.interception.listening


@pytest.mark.parametrize("route", ROUTES)
async def test_two_daemons_that_name_each_other_answer_at_once(tmp_path: Path, route: str) -> None:
    async with serving(tmp_path / "a") as one, serving(tmp_path / "b", upstream=(one.app.url,)) as other:
        assert (await announce(one, other.app.url)).status == 200
        async with asyncio.timeout(300):
            answer = await one.ask("POST", route, ROUTES[route])
        assert answer.status == 508
        assert "an engine of this proxy leads back to it" in answer.body.decode()
        assert await opened(one) == await opened(other) == (route != "/v1/embeddings")
        assert (await one.status())["calls"]["running"] == 0


async def test_two_daemons_one_behind_the_other_are_no_loop(tmp_path: Path) -> None:
    async with (
        EngineStub() as stub, serving(tmp_path / "a", upstream=(stub.url,)) as behind,
        serving(tmp_path / "b", upstream=(behind.app.url,)) as before,
    ):
        headers = {"Via": "1.0 ajet_proxy, 1.1 ajet_proxy-0123456789abcdef", "X-AJet-Episode": "ep"}
        assert (await before.ask("POST", "/v1/chat/completions", CHAT, **headers)).status == 200
        seen, *_ = stub.llm_requests()  # the others ask how the engine samples
        assert not [name for name in seen.headers if name.startswith("x-ajet")]
        names = [item.split()[1] for item in seen.headers["via"].split(",")]
    assert len(names) == len(set(names))
    assert names[-1] == behind.app.name


async def test_an_intercepted_request_that_came_through_this_daemon_is_a_loop(tmp_path: Path) -> None:
    """As one is that the daemon sends to a provider, behind a firewall that sends it back."""
    async with (
        EngineStub() as stub, serving(tmp_path, upstream=(stub.url,), intercept=("127.0.0.1:0",)) as client,
    ):
        (port,) = (on.address[1] for on in intercepting(client))
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca" / "mitmproxy-ca-cert.pem"))
        async with client.session.post(
            "https://api.openai.com/v1/chat/completions", json=CHAT, headers={"Via": f"1.1 {client.app.name}"},
            proxy=f"http://127.0.0.1:{port}", ssl=trusting,
        ) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (508, "loop_detected")
        assert stub.requests == [] and await opened(client) == 0


@pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
def test_the_workers_of_a_daemon_know_its_requests_again(tmp_path: Path) -> None:
    """Each of two daemons is the other's engine, and any worker may hear what another one has sent."""
    port = free_port()
    with (
        ProxyProcess(f"http://127.0.0.1:{port}", tmp_path / "a", options=("--workers", "2")) as one,
        ProxyProcess(one.url, tmp_path / "b", options=("--workers", "2"), port=port) as other,
    ):
        for _ in range(6):
            answer = httpx.post(f"{one.url}/v1/chat/completions", json=CHAT, timeout=300, trust_env=False)
            assert (answer.status_code, answer.json()["error"]["code"]) == (508, "loop_detected")
        assert [daemon.report()["episodes"]["opened"] for daemon in (one, other)] == [6, 6]
