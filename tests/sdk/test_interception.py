"""``ajet run --intercept``: programs that know nothing but their provider's address, in the environment they get."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk import Client, errors
from ajet_sdk.interception import NODE_PRELOAD, Interception, bundle, intercepting
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.sdk.conftest import Ajet

DAEMON = ("--intercept", "127.0.0.1:0")
NEEDS_PROXY = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
CA, TRUSTED = Path("/x/ca.pem"), Path("/x/trusted.pem")
FOUND = Interception("http://gpu:8485", ("api.openai.com",), "gpu", CA, TRUSTED)
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
AGENTS = {
    "openai": (sys.executable, "-c", f"""
import openai
client = openai.OpenAI()
assert str(client.base_url) == "https://api.openai.com/v1/", client.base_url
client.chat.completions.create(**{CHAT!r})
"".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**{CHAT!r}, stream=True))
"""),
    "hard-coded": (sys.executable, "-c", f"""
import json, urllib.request
for stream in (False, True):
    body = json.dumps({CHAT!r} | {{"stream": stream}}).encode()
    headers = {{"Authorization": "Bearer sk-their-own", "Content-Type": "application/json"}}
    urllib.request.urlopen(urllib.request.Request("https://api.openai.com/v1/chat/completions", body, headers)).read()
"""),
    "curl": ("sh", "-c", f"""
set -e
ask() {{ curl -fsS -H 'Content-Type: application/json' -H "$1" -d "$2" "$3"; }}
ask "Authorization: Bearer $OPENAI_API_KEY" '{json.dumps(CHAT)}' https://api.openai.com/v1/chat/completions
ask 'x-api-key: sk-ant-their-own' '{json.dumps(CHAT)}' https://api.anthropic.com/v1/messages
"""),
    "node fetch": ("node", "--input-type=module", "-e", f"""
for (const stream of [false, true]) {{
  const answer = await fetch("https://api.openai.com/v1/chat/completions", {{
    body: JSON.stringify({{ ...{json.dumps(CHAT)}, stream }}),
    headers: {{ "content-type": "application/json" }},
    method: "POST",
  }});
  if (!answer.ok || !(await answer.text()).includes("content")) process.exit(1);
}}
"""),
    "node https": ("node", "-e", f"""
const https = require("https");
const agent = new https.Agent({{ keepAlive: true }});
const headers = {{ "content-type": "application/json", "x-api-key": "sk-ant-their-own" }};
const ask = (after) => https.request(
  "https://api.anthropic.com/v1/messages", {{ method: "POST", agent, headers }},
  (answer) => answer.resume().on("end", () => answer.statusCode === 200 ? after() : process.exit(1)),
).end({json.dumps(json.dumps(CHAT))});
ask(() => setImmediate(ask, () => {{}}));
"""),
}
each = pytest.mark.parametrize("agent", [
    "openai", "hard-coded", pytest.param("curl", marks=NEEDS_CURL), pytest.param("node fetch", marks=NEEDS_NODE),
    pytest.param("node https", marks=NEEDS_NODE),
])


def test_the_environment() -> None:
    outer = {
        "OPENAI_BASE_URL": "u", "OPENAI_API_BASE": "u", "ANTHROPIC_BASE_URL": "u", "OPENAI_API_KEY": "ajet-k.s",
        "HTTPS_PROXY": "http://theirs", "NODE_OPTIONS": "--no-warnings", "HOME": "/h",
    }
    env = FOUND.environment(outer, "ajet-k/s")
    assert env.pop("NODE_OPTIONS") == f'--no-warnings --require="{NODE_PRELOAD}"'
    assert env == {
        "OPENAI_API_KEY": "ajet-k.s", "HOME": "/h", "NODE_EXTRA_CA_CERTS": str(CA),
        **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://ajet-k%2Fs:x@gpu:8485"),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1,gpu"),
        **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "DENO_CERT"), str(TRUSTED)),
    }


def test_where_connections_are_caught_without_a_proxy_the_certificates_are_enough() -> None:
    """They do not go through a proxy that other connections need."""
    outer = {"OPENAI_BASE_URL": "u", "HTTPS_PROXY": "theirs", "NO_PROXY": "*.x"}
    env = Interception(None, ("api.x",), "gpu", CA, TRUSTED).environment(outer, "k")
    assert (env["HTTPS_PROXY"], env["NO_PROXY"]) == ("theirs", "localhost,127.0.0.1,::1,gpu,api.x,*.x")
    assert env["SSL_CERT_FILE"] == str(TRUSTED)
    assert not {"OPENAI_BASE_URL", "NODE_OPTIONS"} & set(env)


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("", ""), ("corp.example, 10.0.0.0/8,gpu", ",corp.example,10.0.0.0/8"), ("*", ""), ("api.openai.com", ""),
        (".OpenAI.com,a.b", ",a.b"), ("*.openai.com:443", ""), ("com", ""), ("penai.com", ",penai.com"),
    ],
)
@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_hosts_that_went_without_a_proxy_still_do_unless_they_are_listed(name: str, before: str, kept: str) -> None:
    env = FOUND.environment({name: before}, "k")
    assert env["NO_PROXY"] == env["no_proxy"] == "localhost,127.0.0.1,::1,gpu" + kept


def calls_of(proxy: ProxyProcess, task: str) -> list[list[dict[str, Any]]]:
    """The calls of each episode of `task`."""
    with Rig(proxy.url) as rig:
        episodes = [item["episode"] for item in rig.get("/episodes").json()["episodes"] if item["task"] == task]
        return [rig.record(episode)["calls"] for episode in episodes]


@NEEDS_PROXY
@each
def test_a_program_with_no_base_url_is_captured_in_its_own_episode(
    daemon: ProxyProcess, ajet: Ajet, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    began, options = time.monotonic(), ("--task", agent, "--repeat", "2", "--parallel", "2", "--intercept")
    _, out, err = ajet("run", *options, "--", *AGENTS[agent])
    assert "2 episodes: 2 rewarded, mean reward 1" in out, out + err
    assert time.monotonic() - began < 500  # what is kept alive for ten minutes keeps no program from its end
    for calls in calls_of(daemon, agent):
        assert [(call["complete"], call["identified_by"]) for call in calls] == [(True, "key")] * 2
        assert all(call["token_ids"] and len(call["token_ids"]) == len(call["logprobs"]) for call in calls)
    assert len(calls_of(daemon, agent)) == 2
    files = [path for path in daemon.data_dir.rglob("*") if path.is_file()]
    assert "their-own" not in "".join(path.read_text(errors="replace") for path in files)


@NEEDS_PROXY
@NEEDS_NODE
@pytest.mark.parametrize(("host", "said"), [
    ("nowhere.invalid", "502 ajet-proxy: cannot reach nowhere.invalid"), ("localhost", "ECONNREFUSED"),
])
def test_a_host_that_node_cannot_reach_is_a_clear_error(daemon: ProxyProcess, ajet: Ajet, host: str, said: str) -> None:
    ask = f"require('tls').connect(443, '{host}').on('error', (error) => console.log(String(error.code ?? error)))"
    _, out, err = ajet("run", "--task", "t", "--intercept", "--", "node", "-e", ask)
    assert said in out, out + err


@NEEDS_PROXY
def test_a_program_that_rewards_itself_goes_to_the_proxy_without_a_proxy(daemon: ProxyProcess, ajet: Ajet) -> None:
    agent = "import ajet_sdk; ajet_sdk.reward(0.25)"
    _, out, err = ajet("run", "--task", "own", "--intercept", "--", sys.executable, "-c", agent)
    assert "mean reward 0.25" in out
    assert "does the program use HTTPS_PROXY" in err


@NEEDS_PROXY
def test_a_program_that_no_firewall_redirects_is_not_told_of_a_proxy(engine: str, ajet: Ajet, tmp_path: Path) -> None:
    with ProxyProcess(engine, tmp_path / "data", options=("--intercept", "transparent@127.0.0.1:0")) as other:
        _, _, err = ajet("run", "--proxy", other.url, "--task", "t", "--intercept", "--", "true")
    assert "does the program run where its connections are redirected, trust SSL_CERT_FILE, and see no errors?" in err


@NEEDS_PROXY
def test_a_bundle_that_is_made_of_itself_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted, ca = tmp_path / "trusted.pem", b"-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n"
    trusted.write_bytes(ca.replace(b"ours", b"theirs"))
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    trusted.write_bytes(made := bundle(ca))
    assert bundle(ca) == made == ca.replace(b"ours", b"theirs") + ca


@pytest.fixture
def private() -> Iterator[None]:
    """Whatever is made is for its owner alone."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("private")
def test_the_certificates_are_there_for_every_user_and_gone_when_the_run_is(proxy: ProxyProcess) -> None:
    with Client(proxy.url) as client, intercepting(client) as found:
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (found.ca, found.trusted, found.ca.parent)]
        assert modes == [0o644, 0o644, 0o755]
        assert found.hosts == ("api.anthropic.com", "api.openai.com")
        assert found.trusted.read_bytes().endswith(found.ca.read_bytes())
        assert b"PRIVATE" not in found.trusted.read_bytes()
    assert not found.ca.parent.exists()


@NEEDS_PROXY
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "this proxy intercepts nothing: start it with --intercept"),
        (("--intercept", "socks5@127.0.0.1:0"), "this proxy intercepts as socks5 only"),
    ],
)
def test_a_proxy_that_does_not_intercept_programs_is_one_clear_line(
    engine: str, ajet: Ajet, tmp_path: Path, options: Sequence[str], said: str
) -> None:
    with ProxyProcess(engine, tmp_path / "data", options=options) as other:
        code, out, err = ajet("run", "--proxy", other.url, "--task", "t", "--intercept", "--", "true")
        assert (code, out, err.count("\n"), said in err) == (1, "", 1, True)
        with Client(other.url) as client, pytest.raises(errors.NotFound), intercepting(client):
            pass
