"""Who an intercepted request is from, and that no provider's credential goes on."""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from ajet_proxy.core.identity.keys import EVERYTHING, Claims
from ajet_proxy.io.intercept.tunnels import PROVIDER_CREDENTIALS, Caller, Interception, Tunnels
from ajet_proxy.settings import Mode
from ajet_sdk.errors import Unauthorized
from tests.proxy.io.intercepting import HOSTS, KEY, get, intercepting

HERE = ("127.0.0.1", 1)


class Transport:
    """A connection to the front from `HERE`."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return HERE if name == "peername" else default


def refuses_all(key: str | None) -> Claims:
    raise Unauthorized("this API key has expired")


def tunnels(**more: Any) -> Tunnels:
    return Tunnels(("api.openai.com",), **({"authenticate": lambda key: EVERYTHING, "needs_key": False} | more))


def sent(known: Tunnels, headers: dict[str, str]) -> dict[str, str]:
    http = make_mocked_request("POST", "/v1/x", headers=headers, transport=Transport())  # type: ignore[arg-type]
    return {name.lower(): value for name, value in known.headers(http).sent.items()}


@pytest.mark.parametrize("name", sorted(PROVIDER_CREDENTIALS))
@pytest.mark.parametrize("key", ["ajet-k.s", None])
def test_nothing_for_the_provider_goes_on(name: str, key: str | None) -> None:
    known = tunnels()
    known.open(HERE, Caller(key, admitted=True))
    headers = sent(known, {name: "Bearer sk-theirs", "X-Stainless-Lang": "python", "Content-Type": "application/json"})
    expected = {"x-stainless-lang": "python", "content-type": "application/json"}
    assert headers == expected | ({"authorization": f"Bearer {key}"} if key else {})


@pytest.mark.parametrize(("name", "value"), [("Authorization", "Bearer ajet-own.s"), ("X-Api-Key", "ajet-own.s")])
def test_a_key_of_ours_in_the_request_itself_goes_first(name: str, value: str) -> None:
    known = tunnels()
    known.open(HERE, Caller("ajet-k.s", admitted=True))
    assert sent(known, {name: value, "Cookie": "session=theirs"}) == {name.lower(): value}


def test_a_source_is_its_last_callers() -> None:
    known, first, second = tunnels(), Caller("ajet-1.s", admitted=True), Caller("ajet-2.s", admitted=True)
    known.open(HERE, first)
    known.open(HERE, second)
    known.close(HERE, first)
    assert sent(known, {})["authorization"] == "Bearer ajet-2.s"
    known.close(HERE, second)
    assert sent(known, {}) == {}


def test_who_may_use_the_interceptor() -> None:
    assert tunnels().refusal(None) is None
    assert tunnels().refusal("ajet-k.s") is None
    assert "needs a key" in str(tunnels(needs_key=True).refusal(None))
    assert tunnels(authenticate=refuses_all).refusal("ajet-k.s") == "this API key has expired"
    wrong = tunnels(authenticate=lambda key: Claims("trainer"))
    assert "scope" in str(wrong.refusal("ajet-k.s"))


def test_hosts_are_compared_as_dns_does() -> None:
    known = Tunnels(("API.OpenAI.com.",), authenticate=lambda key: EVERYTHING, needs_key=False)
    assert known.lists("api.openai.com") and known.lists("api.openai.COM.")
    assert not known.lists("openai.com") and not known.lists("xapi.openai.com") and not known.lists("")


async def test_the_fronts_listener_answers_the_interceptor_alone(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        running.port = running.front.address[1]
        status, body = await get(await running.open(), "/v1/models", "localhost")
        assert (status, body["error"]["code"]) == (403, "not_intercepted")
        assert running.front.seen == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
async def test_nobody_is_taken_for_a_caller_by_its_port(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        assert (await get(await running.tunnel("localhost", 80, KEY), "/v1/models", "localhost"))[0] == 200
        [(_, port)] = running.front.tunnels._callers
        host, front = running.front.address
        connection = await asyncio.open_connection(host, front, local_addr=("127.0.0.2", port))
        running.writers.append(connection[1])
        status, body = await get(connection, "/v1/models", "localhost")
        assert (status, body["error"]["code"]) == (403, "not_intercepted")


@pytest.mark.parametrize("host", ["127.0.0.1", "example.com", "[", ""])
async def test_a_tunnel_to_a_listed_host_carries_requests_to_listed_hosts_only(tmp_path: Path, host: str) -> None:
    async with intercepting(tmp_path / "ca") as running:
        connection = await running.tunnel("localhost", 80)
        for listed in ("localhost:80", *HOSTS):
            assert (await get(connection, "/v1/models", listed))[0] == 200
        assert (await get(connection, "/v1/models", host))[0] in (400, 403)
        assert len(running.front.seen) == 1 + len(HOSTS)


async def test_who_asks_for_a_websocket_is_told_to_use_http(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        connection = await running.tunnel("localhost", 80)
        status, body = await get(connection, "/v1/responses", "localhost", Upgrade="WebSocket", Connection="Upgrade")
        assert (status, body["error"]["code"]) == (426, "no_websockets")
        assert (await get(connection, "/v1/models", "localhost"))[0] == 200
        assert len(running.front.seen) == 1


async def test_plain_http_shows_its_key_with_each_request(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca", needs_key=True) as running:
        connection = await running.open()
        shown = f"Basic {base64.b64encode(f'{KEY}:'.encode()).decode()}"
        for extra, expected in (({}, 407), ({"Proxy_Authorization": shown}, 200), ({}, 407)):
            assert (await get(connection, "http://localhost/v1/models", "localhost", **extra))[0] == expected
        assert [headers["authorization"] for headers in running.front.headers] == [f"Bearer {KEY}"]


def test_what_status_says() -> None:
    modes = (
        Mode("socks5", ("127.0.0.1", 1)), Mode("regular", ("0.0.0.0", 2)), Mode("regular", ("::1", 3)),
        Mode("local", None),
    )
    shown = Interception(("a", "b"), modes, b"").to_json("gpu-1")
    assert shown == {
        "url": "http://gpu-1:2", "hosts": ["a", "b"],
        "modes": [
            {"kind": "socks5", "host": "127.0.0.1", "port": 1}, {"kind": "regular", "host": "gpu-1", "port": 2},
            {"kind": "regular", "host": "::1", "port": 3}, {"kind": "local"},
        ],
    }
    assert Interception((), modes[2:], b"").to_json(None)["url"] == "http://[::1]:3"
    assert Interception((), modes[3:], b"").to_json("x")["url"] is None
