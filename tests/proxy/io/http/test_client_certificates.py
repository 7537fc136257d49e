"""Who must show a certificate, who need not, and what is said of it; certificates are made here."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.daemon import App
from ajet_proxy.io.http import keyring
from ajet_proxy.settings import Config
from ajet_sdk.routes import PREFIX, ROUTES
from ajet_sdk.settings import ConfigError
from tests.kit.certificates import Authority, Pair
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Client, serving

SECRET = "a secret of the operator"


@dataclass
class Site:
    """A daemon with TLS that knows the authority of its trainers, and the keys that it signed."""

    folder: Path
    client: Client
    servers: Authority
    trainers: Authority

    def key(self, scope: str) -> str:
        return keyring.keys(self.folder / "data").issue(Claims(scope, "team" if scope == "agent" else ""))

    async def ask(
        self, method: str, path: str, *, key: str, shown: Pair | None = None, body: Any = None
    ) -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=self.servers.file)
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.request(method, self.client.app.url + path, json=body or {}, headers=headers) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "data" / "audit.jsonl").read_text().splitlines()]


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """A daemon; its parameter is how many workers it has."""
    servers, trainers = Authority(tmp_path, "servers"), Authority(tmp_path, "trainers")
    own = servers.sign("proxy")
    settings = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": trainers.file, "admin_secret": SECRET,
                "workers": getattr(request, "param", 1)}  # fmt: skip
    async with (
        EngineStub() as stub, serving(tmp_path / "data", upstream=(stub.url,), drain_s=1.0, **settings) as client,
    ):
        yield Site(tmp_path, client, servers, trainers)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.scope == "trainer"], ids=lambda route: route.name)
async def test_every_route_of_a_trainer_takes_key_and_certificate(site: Site, route: Any) -> None:
    path = PREFIX + route.path.replace("{id}", "none")
    bodies = {"policy": {"model": "m", "version": 1}, "trainers": {"model": "m", "run": "r", "instance": "i"},
              "gate_open": {"policy_version": 1}, "ack": {"policy_version": 1},
              "evaluate": {"model": "m", "episodes": 1}, "supervise": {"name": "s", "instance": "i"}}  # fmt: skip
    shown, body = site.trainers.sign("trainer-1"), bodies.get(route.name)
    for key in (site.key("trainer"), SECRET):
        status, answer = await site.ask(route.method, path, key=key, body=body)
        assert (status, answer["error"]["code"]) == (403, "client_certificate_required")
        assert "tls_cert and tls_key" in answer["error"]["message"]
    status, _ = await site.ask(route.method, path, key=site.key("trainer"), shown=shown, body=body)
    assert status in (200, 204, 404)
    status, answer = await site.ask(route.method, path, key=site.key("agent"), shown=shown, body=body)
    assert status == 403
    assert "certificate" not in answer["error"]["message"]


async def test_agents_and_admins_need_none(site: Site) -> None:
    status, answer = await site.ask("POST", "/v1/chat/completions", key=site.key("agent"), body=CHAT)
    assert (status, answer["object"]) == (200, "chat.completion")
    assert (await site.ask("GET", f"{PREFIX}/status", key=site.key("agent")))[0] == 200
    assert (await site.ask("GET", f"{PREFIX}/episodes", key=SECRET))[0] == 200
    assert (await site.ask("POST", f"{PREFIX}/episodes", key=site.key("agent")))[0] == 200


@pytest.mark.parametrize("site", [1, 2], indirect=True)
async def test_the_audit_names_whose_certificate_it_was(site: Site) -> None:
    key = site.key("trainer")
    await site.ask("POST", f"{PREFIX}/batches/lease", key=key)
    named = site.trainers.sign("trainer-1", organization="Example")
    await site.ask("POST", f"{PREFIX}/batches/lease", key=key, shown=named)
    await site.ask("POST", f"{PREFIX}/batches/lease", key=key, shown=site.trainers.sign(""))
    refused, lease, nameless = site.audit()
    assert (refused["status"], "certificate" in refused) == (403, False)
    assert (lease["status"], lease["certificate"], lease["scope"]) == (204, "CN=trainer-1,O=Example", "trainer")
    assert nameless["certificate"].startswith("serial ")


@pytest.mark.parametrize(("kind", "words"), [("stranger", "self.signed|unable to get"), ("late", "expired")])
async def test_a_certificate_that_does_not_hold_is_refused_in_the_handshake(
    site: Site, kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever shows one that is not good gets nowhere, not even where none is needed; the log says why."""
    signer = Authority(site.folder, "others") if kind == "stranger" else site.trainers
    shown = signer.sign(kind, days=-1 if kind == "late" else 1)
    with caplog.at_level(logging.WARNING, "ajet_proxy"), pytest.raises(aiohttp.ClientError):
        await site.ask("GET", f"{PREFIX}/status", key=SECRET, shown=shown)
    assert caplog.messages[0].startswith("a client was refused for its certificate: ")
    assert any(word in caplog.messages[0] for word in words.split("|"))
    caplog.clear()


async def test_a_file_that_is_no_certificate_is_a_configuration_error(tmp_path: Path) -> None:
    own = Authority(tmp_path).sign("proxy")
    (tmp_path / "x").write_text("nothing")
    settings = {"tls_cert": own.cert, "tls_key": own.key}
    for name in ("tls_client_ca", "tls_cert"):
        for path in (tmp_path / "x", tmp_path / "missing"):
            files = settings | {name: str(path)}
            app = App(Config(listen="127.0.0.1:0", data_dir=str(tmp_path / "d"), **files))
            with pytest.raises(ConfigError, match=f"cannot use {name} {path}"):
                await app.start()
