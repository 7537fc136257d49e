"""Interception: an unmodified client that believes it talks to a provider; starting and stopping."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.io.intercept.interceptor import Interceptor
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.settings import Mode, split_mode
from tests.proxy.io.intercepting import Running, intercepting, run_child

OPENAI_AGENT = """
import openai
client = openai.OpenAI()
messages = [{"role": "user", "content": "Say hi"}]
whole = client.chat.completions.create(model="m", messages=messages)
chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(client.base_url, whole.choices[0].message.content, text)
"""


async def test_the_unmodified_openai_client_reaches_the_front(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        env = {"HTTPS_PROXY": running.url, "SSL_CERT_FILE": running.bundle, "OPENAI_API_KEY": "sk-x"}
        code, out, err = await run_child(OPENAI_AGENT, **env)
        assert code == 0, err
        assert out.split() == ["https://api.openai.com/v1/", "hi", "hi"]
        assert running.front.seen == [("POST", "/v1/chat/completions", "api.openai.com")] * 2
        assert "sk-x" not in str(running.front.headers)
        assert running.counted("captured") >= 1


async def test_a_client_that_does_not_trust_our_ca_sends_nothing(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        code = "import openai; openai.OpenAI(max_retries=0).models.list()"
        status, _, err = await run_child(code, HTTPS_PROXY=running.url, OPENAI_API_KEY="sk-x")
        assert status != 0
        assert "CERTIFICATE_VERIFY_FAILED" in err
        assert running.front.seen == []
        assert running.counted("tls_failed") == 1


def prepared(directory: Path, *specs: str, running: Running) -> Interceptor:
    modes = [split_mode(text) for text in specs]
    return Interceptor(directory=directory, modes=modes, tunnels=running.front.tunnels, metrics=Metrics())


async def test_the_ca_is_kept_over_a_restart(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "ca") as running:
        before = (tmp_path / "ca" / "mitmproxy-ca.pem").read_bytes()
        assert running.interceptor.listening == (Mode("regular", ("127.0.0.1", running.port)),)
    async with intercepting(tmp_path / "ca"):
        assert (tmp_path / "ca" / "mitmproxy-ca.pem").read_bytes() == before


async def test_an_address_that_is_taken_is_a_clear_error_and_frees_the_others(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "a") as running:
        free = "127.0.0.1:0"
        second = prepared(tmp_path / "b", f"socks5@{free}", f"127.0.0.1:{running.port}", running=running)
        with pytest.raises(OSError, match=f"cannot intercept: .*127.0.0.1:{running.port}.* listens on port"):
            await second.start(running.front.address)
        assert second.listening == ()
        assert all(not item.is_running for item in second._server.servers)


async def test_several_modes_at_once(tmp_path: Path) -> None:
    async with intercepting(tmp_path / "a") as running:
        both = prepared(tmp_path / "b", "127.0.0.1:0", "socks5@localhost:0", running=running)
        await both.start(running.front.address)
        assert [item.kind for item in both.listening] == ["regular", "socks5"]
        ports = [item.address[1] for item in both.listening if item.address]
        assert len(set(ports)) == 2 and all(ports)
        await both.close()
        for port in ports:
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)


async def test_a_silent_name_server_leaves_threads_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real = threading.Event(), socket.getaddrinfo

    def silent(host: Any, *more: Any, **options: Any) -> Any:
        if str(host).endswith(".example"):
            answers.wait(900)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    async with intercepting(tmp_path / "ca") as running:
        asking = [asyncio.create_task(running.connect(f"{number}.example:443")) for number in range(100)]
        await asyncio.sleep(0.5)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 300) == "done"
        answers.set()
        for status, _ in await asyncio.gather(*asking):
            assert status.startswith(b"HTTP/1.1 502 ajet-proxy: cannot reach ")


def test_starting_the_daemon_without_interception_loads_no_mitmproxy() -> None:
    code = "import sys, ajet_proxy.daemon; sys.exit('mitmproxy' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
