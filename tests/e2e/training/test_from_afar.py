"""One run of the real trainer is started, changed, stopped and resumed by HTTP alone, from another network.

It is curl that asks, over TLS, with a key that may do nothing else.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet_sdk.runs import LEARNING_RATE
from tests.e2e.players import Players
from tests.kit.certificates import Authority
from tests.kit.environment import clean
from tests.kit.hosts import Hosts, lacking
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import TRAINER, end_all

LACKING = lacking()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LACKING is not None, reason=str(LACKING))]
GROUPS, SIZE = 2, 4
FIRST, SECOND = 1e-4, 3e-4
CONFIG = {
    "trainer": {"model": "tiny", "groups": GROUPS, "group_size": SIZE, "max_tokens": 256, "save_freq": 2},
    "verl": {"trainer.device": "cpu", LEARNING_RATE: FIRST},
}


class Supervised:
    """``ajet-trainer serve`` with its daemon and the agents on one host, over TLS. Who asks has a host of its own, curl
    and a key."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.log = folder, folder / "supervisor.log"
        self.hosts = stack.enter_context(Hosts("site", "operator"))
        inside, address = self.hosts.inside("site"), self.hosts.address("site")
        authority = Authority(folder, "servers")
        own, self.ca, self.url = authority.sign("daemon", address=address), authority.file, f"https://{address}:8484"
        options = ("--listen", f"{address}:8484", "--tls-cert", own.cert, "--tls-key", own.key)
        secret = {"AJET_ADMIN_SECRET": "a secret of the operator"}
        self.proxy = ProxyProcess(None, folder / "data", port=8484, inside=inside, options=options, env=secret)
        stack.enter_context(self.proxy)
        self._config = folder / "curl"  # not on a command line, which others can read
        key = self.proxy.key("operator")
        self._config.write_text(f'header = "Authorization: Bearer {key}"\ncacert = "{self.ca}"\n')
        stack.enter_context(self.hosts.at("site"))
        allow = folder / "allow.toml"
        allow.write_text(
            f'runs = "{folder}/runs"\n[models]\ntiny = "{build(folder / "tiny")}"\n[verl]\ntrainer.device = ["cpu"]\n'
        )
        command = [str(TRAINER), "serve", "--proxy", self.url, "--allow", str(allow), "--name", "host"]
        env = clean(AJET_TRAINER_KEY=self.proxy.key("trainer"), SSL_CERT_FILE=self.ca)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*inside, *command], env=env, stdout=log, stderr=log)
        stack.callback(self.close)

    def answer(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        sent = [] if body is None else ["--json", json.dumps(body)]
        done = subprocess.run(
            [*self.hosts.inside("operator"), "curl", "-sS", "--config", str(self._config), "-X", method, *sent,
             "-w", "\n%{http_code}", f"{self.url}/ajet/v1{path}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said, _, code = done.stdout.rpartition("\n")
        return int(code), json.loads(said)

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        status, answer = self.answer(method, path, body)
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def lines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/runs/r/metrics")["lines"]
        return found

    def until(self, reached: Callable[[], object], limit_s: float = 900.0) -> None:
        end = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > end:
                words = "\n".join(map(str, self.ask("GET", "/runs/r/log")["lines"][-40:]))
                pytest.fail(f"{self.ask('GET', '/runs/r')}\n{words}\n{self.log.read_text()}")
            time.sleep(1.0)

    def close(self) -> None:
        every = psutil.process_iter(["cmdline"])
        below = [one for one in every if str(self.folder) in " ".join(one.info["cmdline"] or [])]
        children = [child for one in below for child in one.children(recursive=True)]
        end_all([*below, *children])
        self.process.wait()


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    with ExitStack() as stack:
        made = Supervised(tmp_path, stack)
        monkeypatch.setenv("SSL_CERT_FILE", made.ca)
        monkeypatch.setenv("AJET_API_KEY", made.proxy.key("agent"))
        yield made


def test_a_run_is_started_changed_stopped_and_resumed(supervised: Supervised) -> None:
    ask, until, lines = supervised.ask, supervised.until, supervised.lines
    for path in ("/status", "/episodes", "/wanted", "/events"):
        assert supervised.answer("GET", path)[0] == 403
    until(lambda: supervised.answer("PUT", "/runs/r", {"config": CONFIG, "desired": "running"})[0] == 200)
    first = ask("GET", "/runs/r")["digest"]
    with Players(supervised.url, model="policy", group_size=SIZE, parallel=GROUPS * SIZE):
        until(lambda: len(lines()) >= 2)
        assert ask("GET", "/runs/r")["reason"] is None
        assert {line["config"] for line in lines()} == {first}
        change = {"config": {"verl": {LEARNING_RATE: SECOND}}}
        second = ask("PATCH", "/runs/r", change)["digest"]
        until(lambda: lines()[-1]["config"] == second)
        until(lambda: ask("GET", "/runs/r")["reason"] is None)
        refused, answer = supervised.answer("PATCH", "/runs/r", {"config": {"trainer": {"max_tokens": 128}}})
        assert (refused, answer["error"]["code"]) == (409, "needs_restart")
        ask("PATCH", "/runs/r", {"desired": "stopped"})
        until(lambda: ask("GET", "/runs/r")["actual"]["state"] == "stopped")
        until(lambda: lines() == kept(supervised))
        made = len(lines())
        ask("PATCH", "/runs/r", {"desired": "running"})
        until(lambda: len(lines()) >= made + 2)
        ask("PATCH", "/runs/r", {"desired": "stopped"})
        until(lambda: ask("GET", "/runs/r")["actual"]["state"] == "stopped")
    until(lambda: lines() == kept(supervised))
    found = lines()
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    for line in found:
        assert line["lr"] == pytest.approx(FIRST if line["config"] == first else SECOND)
    assert [line["config"] for line in found[made:]] == [second] * (len(found) - made)
    batches = [name for line in found for name in line["batch"].split(",")]
    assert len(batches) == len(set(batches)), "a batch was trained twice"
    assert ask("DELETE", "/runs/r") == {"run": "r"}
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.process.wait(300) == 0


def kept(supervised: Supervised) -> list[dict[str, Any]]:
    """The lines of the run's own file, as they are shown from afar: without the daemon's address."""
    path = supervised.folder / "runs" / "r" / "metrics.jsonl"
    shown = path.read_text().replace(supervised.url, "the daemon")
    return [json.loads(line) for line in shown.splitlines()]
