"""Certificates that are replaced while the daemon runs, and a key that cannot be used."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives import serialization

from ajet_proxy.io.http import tls
from ajet_proxy.settings import Config
from ajet_sdk.routes import PREFIX
from ajet_sdk.settings import ConfigError
from tests.kit.certificates import Authority, Pair
from tests.proxy.serving import Client, serving

SECRET = "a secret of the operator"


class Site:
    """A daemon with TLS, and those who sign certificates."""

    def __init__(self, folder: Path) -> None:
        self.servers, self.others = Authority(folder, "servers"), Authority(folder, "others")
        self.trainers, self.later = Authority(folder, "trainers"), Authority(folder, "later")
        self.own = self.servers.sign("proxy")
        self.client: Client

    def renew(self, pair: Pair, *parts: str) -> None:
        for part in parts:
            replace(getattr(self.own, part), getattr(pair, part))

    async def ask(self, trusted: Authority, shown: Pair | None = None) -> int:
        """The status of a trainer's request of one who trusts servers of `trusted` alone."""
        context = ssl.create_default_context(cafile=trusted.file)
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.post(
                f"{self.client.app.url}{PREFIX}/batches/lease", json={}, headers={"Authorization": f"Bearer {SECRET}"}
            ) as answer,
        ):
            return answer.status


def replace(file: str, by: str) -> None:
    """As tools that renew certificates do it."""
    Path(f"{file}.new").write_bytes(Path(by).read_bytes())
    os.replace(f"{file}.new", file)


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """Its parameter is how many workers the daemon has."""
    site = Site(tmp_path)
    settings = {"tls_cert": site.own.cert, "tls_key": site.own.key, "tls_client_ca": site.trainers.file,
                "admin_secret": SECRET, "workers": getattr(request, "param", 1)}  # fmt: skip
    async with serving(tmp_path / "data", upstream=("http://127.0.0.1:9",), drain_s=1.0, **settings) as site.client:
        yield site


@pytest.mark.parametrize("site", [1, 2], indirect=True)
async def test_a_renewed_certificate_is_used_from_the_next_handshake_on(site: Site) -> None:
    trainer = site.trainers.sign("trainer")
    assert await site.ask(site.servers, trainer) == 204
    site.renew(site.others.sign("renewed"), "cert", "key")
    assert await site.ask(site.others, trainer) == 204
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await site.ask(site.servers, trainer)


async def test_half_of_a_renewal_leaves_the_certificate_as_it_was(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    new = site.others.sign("renewed")
    site.renew(new, "cert")
    with caplog.at_level(logging.INFO, "ajet_proxy"):
        assert [await site.ask(site.servers) for _ in range(2)] == [403, 403]
        (said,) = caplog.messages
        assert said.startswith(f"the certificate stays as it was: cannot use tls_cert {site.own.cert} with tls_key")
        site.renew(new, "key")
        assert await site.ask(site.others) == 403
    assert caplog.messages[1:] == [f"took up the changed certificate {site.own.cert}"]


async def test_files_that_could_not_be_read_are_read_at_the_next_handshake(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_config: Config) -> ssl.SSLContext:
        raise ConfigError("too many open files")

    site.renew(site.others.sign("renewed"), "cert", "key")
    with monkeypatch.context() as patch:
        patch.setattr(tls, "_context", fails)
        assert await site.ask(site.servers) == 403
    assert await site.ask(site.others) == 403


async def test_a_ca_of_trainers_that_was_replaced_is_no_longer_good(site: Site) -> None:
    replace(site.trainers.file, site.later.file)
    assert await site.ask(site.servers, site.later.sign("new")) == 204
    with pytest.raises(aiohttp.ClientError):
        await site.ask(site.servers, site.trainers.sign("old"))


def test_nobody_is_asked_for_the_passphrase_of_a_key(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("proxy")
    key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    Path(pair.key).write_bytes(pem)
    with pytest.raises(ConfigError, match=r"with tls_key .*: the key is encrypted.*without a passphrase"):
        tls.listening(Config(tls_cert=pair.cert, tls_key=pair.key))
