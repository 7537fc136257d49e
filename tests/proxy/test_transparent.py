"""Transparent interception with the rules of docs/guide/interception.md, each in a network of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.kit.certificates import Authority
from tests.kit.namespace import Namespace, lacking
from tests.kit.patience import AJET
from tests.kit.ports import free_port
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.readme import FENCE
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

LACKING = lacking()
pytestmark = [
    pytest.mark.skipif(LACKING is not None, reason=str(LACKING)),
    pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon"),
]
RULES = [found["text"] for found in FENCE.finditer((ROOT / "docs/guide/interception.md").read_text())
         if found["text"].startswith("table inet ajet")]
SECRET = "the-secret-of-an-operator"
AGENT = """
import openai, os, urllib.request
client = openai.OpenAI()
assert str(client.base_url) == "https://api.openai.com/v1/"
messages = [{"role": "user", "content": "hello"}]
client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
body = b'{"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request("https://api.anthropic.com/v1/messages", body, headers)).read()
"""
FOREIGN = "import ssl; print(ssl.get_server_certificate(('other.example', 443)))"
QUIC = """
import socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(300)
udp.connect(("api.openai.com", 443))
try:
    udp.send(b"hello")
    udp.recv(1)
except (ConnectionRefusedError, PermissionError):
    print("refused")
"""
TLS_SERVER = """
import socket, ssl, sys
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
context.load_cert_chain(sys.argv[1], sys.argv[2])
server = context.wrap_socket(socket.create_server((sys.argv[3], 443)), server_side=True)
print("ready", flush=True)
while True:
    try:
        server.accept()[0].close()
    except OSError:
        pass
"""


def rules(net: Namespace, folder: Path, which: int, **replaced: str) -> None:
    """Load one of the page's two tables."""
    text = RULES[which]
    for old, new in ({'skuid "agent"': "skgid 65534"} | replaced).items():
        text = text.replace(old, new)
    (folder / "rules").write_text(text)
    loaded = [net.run("nft", "-f", str(folder / "rules")) + net.run("nft", "list", "ruleset") for _ in range(2)]
    assert loaded[0] == loaded[1]


@contextmanager
def foreign_host(net: Namespace, folder: Path, address: str) -> Iterator[str]:
    """A host that is not listed; its certificate."""
    pair = Authority(folder).sign("here")
    command = [*net.inside, sys.executable, "-c", TLS_SERVER, pair.cert, pair.key, address]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield Path(pair.cert).read_text()
    finally:
        server.kill()
        server.communicate()


def calls_seen(net: Namespace, proxy: ProxyProcess, told: str) -> list[tuple[bool, str]]:
    """The calls of the one rewarded episode in the table `told`: whether each is whole, and who named it."""
    assert "1 episode: 1 rewarded, mean reward 1" in told
    episode = next(word for word in told.split() if word.startswith("ep-"))
    shown = net.run(*AJET, "show", episode, "--json", AJET_PROXY_URL=proxy.url, AJET_API_KEY=SECRET)
    return [(call["complete"], call["identified_by"]) for call in json.loads(shown)["calls"]]


@contextmanager
def one_machine(folder: Path, whose: str = "skgid 65534 ") -> Iterator[tuple[Namespace, ProxyProcess, str]]:
    """A machine whose daemon catches what is sent by the programs that the rules call `whose`, and on which the whole
    world lies; and the certificate of a host there that is not listed."""
    with ExitStack() as stack:
        net = stack.enter_context(Namespace())
        for block in ("192.0.2.0/24", "2001:db8::/64"):
            net.run("ip", "route", "add", "local", block, "dev", "lo")
        net.hosts(folder, api_openai_com="192.0.2.77", api_anthropic_com="2001:db8::77", other_example="192.0.2.2")
        cert = stack.enter_context(foreign_host(net, folder, "192.0.2.2"))
        port = free_port()
        rules(net, folder, 0, **{":8486": f":{port}", "meta skgid 65534 ": f"meta {whose}" if whose else ""})
        engine = stack.enter_context(stub_process(inside=net.inside))
        options = ("--intercept", f"transparent@127.0.0.1:{port}", "--intercept", f"transparent@[::1]:{port}")
        yield net, stack.enter_context(ProxyProcess(engine, folder / "data", options=options, inside=net.inside)), cert


def test_programs_of_one_user_on_the_same_machine(tmp_path: Path) -> None:
    agent = ("setpriv", "--regid", "65534", "--clear-groups", "--")
    with one_machine(tmp_path) as (net, proxy, cert):
        run = (*agent, *AJET, "run", "--task", "t", "--intercept", "--", sys.executable, "-c")
        told = net.run(*run, AGENT, AJET_PROXY_URL=proxy.url)
        assert calls_seen(net, proxy, told) == [(True, "key")] * 2
        assert net.run(*agent, sys.executable, "-c", FOREIGN).split() == cert.split()
        assert net.run(*agent, sys.executable, "-c", QUIC) == "refused\n"


def test_a_daemon_whose_own_connections_come_back_to_it_refuses_them(tmp_path: Path) -> None:
    with one_machine(tmp_path, whose="") as (net, proxy, _):
        asked = [*net.inside, sys.executable, "-c", FOREIGN]
        failed = subprocess.run(asked, capture_output=True, check=False, timeout=300)
        assert failed.returncode != 0
        assert proxy.errors().count("the firewall redirects this daemon's own connections") == 1


def test_containers_that_this_machine_routes_for(tmp_path: Path) -> None:
    with ExitStack() as stack:
        net = stack.enter_context(Namespace())
        inner = stack.enter_context(Namespace(net))
        stack.enter_context(net.cable("agents", "10.77.0.1/24", inner, "eth0", "10.77.0.2/24"))
        for block in ("192.0.2.0/24", "8.8.8.0/24"):
            net.run("ip", "route", "add", "local", block, "dev", "lo")
        net.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        inner.run("ip", "route", "add", "default", "via", "10.77.0.1")
        inner.hosts(tmp_path, api_openai_com="192.0.2.77", api_anthropic_com="192.0.2.78", other_example="8.8.8.8")
        cert = stack.enter_context(foreign_host(net, tmp_path, "0.0.0.0"))
        port = free_port()
        rules(net, tmp_path, 1, **{":8486": f":{port}"})
        engine = stack.enter_context(stub_process(inside=net.inside))
        listening = free_port()
        options = ("--intercept", f"transparent@0.0.0.0:{port}", "--insecure", "--listen", f"0.0.0.0:{listening}")
        secret = {"AJET_ADMIN_SECRET": SECRET}
        proxy = stack.enter_context(
            ProxyProcess(engine, tmp_path / "data", options=options, env=secret, port=listening, inside=net.inside)
        )
        run = (*AJET, "run", "--task", "t", "--intercept", "--", sys.executable, "-c")
        told = inner.run(*run, AGENT, AJET_PROXY_URL=f"http://10.77.0.1:{listening}", AJET_API_KEY=SECRET)
        assert calls_seen(net, proxy, told) == [(True, "key")] * 2
        assert inner.run(sys.executable, "-c", FOREIGN).split() == cert.split()
        assert inner.run(sys.executable, "-c", QUIC) == "refused\n"
        inner.hosts(tmp_path, other_example="192.0.2.2")  # not public, though the daemon's machine reaches it
        failed = subprocess.run([*inner.inside, sys.executable, "-c", FOREIGN], capture_output=True, check=False)
        assert failed.returncode != 0
        assert "refused a connection to 192.0.2.2 port 443: it has no public address" in proxy.errors()
        straight = subprocess.run(
            [*inner.inside, "curl", "-sk", "-m", "10", f"https://10.77.0.1:{port}/"], capture_output=True, check=False
        )
        assert straight.returncode in (35, 52, 56)  # closed without a word: nothing had redirected it here


def test_the_page_has_two_tables() -> None:
    assert len(RULES) == 2
