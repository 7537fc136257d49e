"""The trainer's certificates against a real daemon, and the words for each way in which they can be wrong."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ajet_sdk.errors import Forbidden, ProxyUnreachable
from ajet_sdk.routes import Lease
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config
from ajet_trainer.link import Link, TlsRefused, refusal, tls_context
from tests.kit.certificates import Authority
from tests.kit.proxy_process import ProxyProcess
from tests.trainer.test_link import Clock, link


class Site:
    """A daemon that asks trainers for certificates; `config` is that of a trainer that has one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers, self.trainers = Authority(folder, "servers"), Authority(folder, "trainers")
        own, shown = self.servers.sign("proxy"), self.trainers.sign("trainer-1")
        self.options = ("--tls-cert", own.cert, "--tls-key", own.key, "--tls-client-ca", self.trainers.file)
        self.config = Config(tls_cert=shown.both, model="m")


@pytest.fixture(scope="module", params=["1", "2"], ids=["one process", "workers"])
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    options = (*made.options, "--workers", request.param)
    with ProxyProcess("http://127.0.0.1:1", made.folder / "data", options=options) as proxy:
        made.config = replace(made.config, proxy_url=proxy.url.replace("http:", "https:"))
        yield made


@pytest.fixture(autouse=True)
def trusted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' authority is one that this process trusts."""
    if "site" in request.fixturenames:
        monkeypatch.setenv("SSL_CERT_FILE", request.getfixturevalue("site").servers.file)


def meet(config: Config, deadline_s: float = 300.0) -> None:
    with closing(Link.of(config, deadline_s=deadline_s)) as made:
        made.meet()
        assert made.lease(Lease()) is None


def test_with_its_certificate_a_trainer_may_do_its_work(site: Site) -> None:
    meet(site.config)
    assert '"certificate":"CN=trainer-1"' in (site.folder / "data" / "audit.jsonl").read_text()


def test_a_name_that_is_not_in_the_certificate_is_told_from_a_ca_that_is_unknown(site: Site) -> None:
    elsewhere = site.config.proxy_url.replace("127.0.0.1", "localhost")
    with pytest.raises(TlsRefused, match=r"https://localhost.* is for other names .*: use one in proxy_url"):
        meet(replace(site.config, proxy_url=elsewhere))


def test_without_one_the_first_meeting_says_so(site: Site) -> None:
    with pytest.raises(Forbidden, match=r"https://127\..* also needs a client certificate.*tls_cert"):
        meet(replace(site.config, tls_cert=""))


def test_one_of_another_authority_is_soon_known_to_be_refused(site: Site) -> None:
    shown = Authority(site.folder, "others").sign("stranger")
    with pytest.raises(TlsRefused, match=r"https://127\..* closes our connections, .* must have signed tls_cert"):
        meet(replace(site.config, tls_cert=shown.both), 1e6)


def test_a_front_that_says_why_it_refuses_is_quoted() -> None:
    alert = ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)")
    alert.reason = "TLSV1_ALERT_UNKNOWN_CA"
    error = httpx.ReadError("tlsv1 alert unknown ca")
    error.__cause__ = alert
    found = refusal("https://p", error)
    assert "https://p refuses our certificate (unknown ca)" in str(found)


def test_hang_ups_between_which_nobody_is_there_are_a_restart() -> None:
    gone, hung_up = httpx.ConnectError("refused"), httpx.RemoteProtocolError("Server disconnected")
    errors = [hung_up, hung_up, gone, hung_up, hung_up, hung_up, gone]

    def fail(request: httpx.Request) -> httpx.Response:
        raise errors.pop(0)

    with pytest.raises(TlsRefused, match="closes our connections"):
        link(fail, Clock(), certified=True).nack("b")
    assert errors == [gone]
    errors = [hung_up] * 99
    with pytest.raises(ProxyUnreachable, match="Server disconnected"):
        link(fail, Clock(), certified=False).nack("b")


def test_a_proxy_that_cannot_be_trusted_is_not_asked_twice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(TlsRefused, match=r"certificate of https://127\..* is not trusted .*: name .* in SSL_CERT_FILE"):
        meet(site.config, 1e6)


def test_a_proxy_without_tls_is_named(tmp_path: Path) -> None:
    with ProxyProcess("http://127.0.0.1:1", tmp_path / "data") as proxy:
        url = proxy.url.replace("http:", "https:")
        with pytest.raises(TlsRefused, match=f"{url} does not speak TLS: use http://"):
            meet(Config(proxy_url=url))


def test_files_that_cannot_be_used_are_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/nonexistent", __file__, site.trainers.file):
        with pytest.raises(ConfigError, match=f"cannot use tls_cert {path}, which holds the certificate and its key"):
            tls_context(replace(site.config, tls_cert=path))
    for path in ("/nonexistent", __file__):
        monkeypatch.setenv("SSL_CERT_FILE", path)
        with pytest.raises(ConfigError, match="the file that SSL_CERT_FILE names cannot be used"):
            tls_context(site.config)


def test_other_troubles_of_the_network_are_no_refusal() -> None:
    assert refusal("https://p", httpx.ConnectError("refused")) is None
    assert tls_context(Config()) is None
