"""The client: connections, threads, forks, and faults."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk import Client, aio, errors
from ajet_sdk.client import Reply, Target, connected
from tests.kit.certificates import Authority
from tests.kit.control_stub import ControlStub
from tests.kit.ports import free_port


def ask(url: str, *args: Any, key: str | None = None, deadline: float = 10.0, **more: Any) -> Reply:
    """One request."""
    with Client(url, key, deadline=deadline) as client:
        return client.ask(*args, **more)


def test_many_threads_share_a_client(stub: ControlStub) -> None:
    with Client(stub.url) as client:
        threads = [threading.Thread(target=client.ask, args=("status",)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(stub.heard) == 16


FORK = """
import os, sys
from ajet_sdk import Client, routes

with Client(sys.argv[1]) as client:
    opened = client.ask("open_episode", routes.OpenEpisode(task="t")).json()
    if os.fork() == 0:
        client.ask("get_episode", id=opened["episode"])
    else:
        os.wait()
        client.ask("status")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_has_connections_of_its_own(stub: ControlStub) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FORK, stub.url], check=True)
    parents, childs, again = (heard.peer for heard in stub.heard)
    assert parents == again != childs


def test_a_closed_client_can_be_used_again(stub: ControlStub) -> None:
    with Client(stub.url) as client:
        client.ask("status")
    assert client.ask("status").status == 200
    client.close()


def test_no_proxy_of_the_environment_stands_before_this_machine(
    monkeypatch: pytest.MonkeyPatch, stub: ControlStub
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    assert ask(stub.url, "status", deadline=1.0).status == 200
    assert how(monkeypatch, "http://proxy.example")["trust_env"]


def how(monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, Any]:
    """The options of the connections to a proxy."""
    with monkeypatch.context() as patch:
        patch.setattr(httpx, "AsyncClient", dict)
        return connected(Target(url))  # type: ignore[return-value]


def test_tls_is_verified_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("https://proxy.example", "https://127.0.0.1:1"):
        assert how(monkeypatch, url)["verify"].verify_mode is ssl.CERT_REQUIRED
    assert how(monkeypatch, "http://127.0.0.1:1")["verify"] is False


def test_a_ca_of_ones_own_is_named_in_the_environment(
    stub: ControlStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("proxy")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    stub.speak_tls(context)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    url = stub.url.replace("http:", "https:")
    with pytest.raises(errors.ProxyUnreachable, match=r"not trusted here\. Name the file of its CA in SSL_CERT_FILE"):
        ask(url, "status", deadline=3600.0)  # what no waiting changes is not waited for
    monkeypatch.setenv("SSL_CERT_FILE", authority.file)
    assert ask(url, "status").status == 200
    with pytest.raises(errors.ProxyUnreachable, match="is for other names: use one of those"):
        ask(url.replace("127.0.0.1", "localhost"), "status", deadline=3600.0)


def test_a_client_never_used_is_closed_without_a_connection() -> None:
    with Client("http://proxy"):
        pass

    async def go() -> None:
        async with aio.Client("http://proxy"):
            pass

    asyncio.run(go())
