"""Who must show a certificate and what is said of it; those that are replaced while the daemon runs."""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives import serialization

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.daemon import App
from ajet_proxy.io.http import tls
from ajet_proxy.settings import Config
from ajet_sdk.routes import PREFIX, ROUTES
from ajet_sdk.settings import ConfigError
from tests.kit.certificates import Authority, Pair
from tests.kit.engine_stub import EngineStub
from tests.proxy.serving import CHAT, Client, serving

SECRET = "a secret of the operator"


class Site:
    """A daemon with TLS, and those who sign certificates: for it, for its trainers, and strangers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("servers", "trainers", "others")
        self.servers, self.trainers, self.others = (Authority(folder, name) for name in names)
        self.own = self.servers.sign("proxy")
        self.client: Client

    def key(self, scope: str) -> str:
        return self.client.key(Claims(scope, "team" if scope == "agent" else ""))  # type: ignore[arg-type]

    async def ask(
        self, method: str, path: str, *, key: str = SECRET, shown: Pair | None = None, body: Any = None,
        trusted: Authority | None = None,
    ) -> tuple[int, Any]:
        """The answer to one who trusts servers of `trusted` alone, and has a certificate `shown`."""
        context = ssl.create_default_context(cafile=(trusted or self.servers).file)
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.request(method, self.client.app.url + path, json=body or {}, headers=headers) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def lease(self, trusted: Authority | None = None, shown: Pair | None = None) -> int:
        """The status of a trainer's request."""
        return (await self.ask("POST", f"{PREFIX}/batches/lease", trusted=trusted, shown=shown))[0]

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "data" / "audit.jsonl").read_text().splitlines()]

    def renew(self, pair: Pair, *parts: str) -> None:
        for part in parts:
            replace(getattr(self.own, part), getattr(pair, part))


def replace(file: str, by: str) -> None:
    """As tools that renew certificates do it."""
    Path(f"{file}.new").write_bytes(Path(by).read_bytes())
    os.replace(f"{file}.new", file)


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path, stub: EngineStub) -> AsyncIterator[Site]:
    """Its parameter is how many workers the daemon has."""
    site = Site(tmp_path)
    settings = {"tls_cert": site.own.cert, "tls_key": site.own.key, "tls_client_ca": site.trainers.file,
                "admin_secret": SECRET, "workers": getattr(request, "param", 1)}  # fmt: skip
    async with serving(tmp_path / "data", upstream=(stub.url,), drain_s=1.0, **settings) as site.client:
        yield site


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
    signer = site.others if kind == "stranger" else site.trainers
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


# --- renewal


@pytest.mark.parametrize("site", [1, 2], indirect=True)
async def test_a_renewed_certificate_is_used_from_the_next_handshake_on(site: Site) -> None:
    trainer = site.trainers.sign("trainer")
    assert await site.lease(shown=trainer) == 204
    site.renew(site.others.sign("renewed"), "cert", "key")
    assert await site.lease(site.others, trainer) == 204
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await site.lease(shown=trainer)


async def test_half_of_a_renewal_leaves_the_certificate_as_it_was(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    new = site.others.sign("renewed")
    site.renew(new, "cert")
    with caplog.at_level(logging.INFO, "ajet_proxy"):
        assert [await site.lease() for _ in range(2)] == [403, 403]
        (said,) = [said for said in caplog.messages if "certificate" in said]
        assert said.startswith(f"the certificate stays as it was: cannot use tls_cert {site.own.cert} with tls_key")
        site.renew(new, "key")
        assert await site.lease(site.others) == 403
    assert caplog.messages[-1] == f"took up the changed certificate {site.own.cert}"


async def test_files_that_could_not_be_read_are_read_at_the_next_handshake(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_config: Config) -> ssl.SSLContext:
        raise ConfigError("too many open files")

    site.renew(site.others.sign("renewed"), "cert", "key")
    with monkeypatch.context() as patch:
        patch.setattr(tls, "context_of", fails)
        assert await site.lease() == 403
    assert await site.lease(site.others) == 403


async def test_a_ca_of_trainers_that_was_replaced_is_no_longer_good(site: Site) -> None:
    replace(site.trainers.file, site.others.file)
    assert await site.lease(shown=site.others.sign("new")) == 204
    with pytest.raises(aiohttp.ClientError):
        await site.lease(shown=site.trainers.sign("old"))


def test_nobody_is_asked_for_the_passphrase_of_a_key(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("proxy")
    key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    Path(pair.key).write_bytes(pem)
    with pytest.raises(ConfigError, match=r"with tls_key .*: the key is encrypted.*without a passphrase"):
        tls.listening(Config(tls_cert=pair.cert, tls_key=pair.key))
