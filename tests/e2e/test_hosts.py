"""A daemon, a trainer and agents on hosts of their own, while the network between them fails or a host is lost.

Everything of ours is real but for verl and vLLM. Here a way is lost as ways between hosts are: packets vanish, nobody
is told, and what was on its way may still come when the way is back.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link, tls_context
from ajet_trainer.progress import Progress
from ajet_trainer.sampling import Rule
from ajet_trainer.step import Run
from tests.kit.certificates import Authority
from tests.kit.environment import clean
from tests.kit.hosts import Hosts, lacking
from tests.kit.patience import AJET
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.source import ROOT
from tests.kit.still_learner import StillLearner
from tests.kit.stub_process import stub_process

LACKING = lacking()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(LACKING is not None, reason=str(LACKING)),
    pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon"),
]
SECRET = "the-secret-of-an-operator"
TASKS, SIZE, LEASE_S, CUT_S = 8, 2, 2.0, 4.0
RUN = (*AJET, "run", "--quiet", "--task", "t", "--repeat", "2")
PROGRAM = """
import openai, os
messages = [{"role": "user", "content": os.environ["AJET_EPISODE"]}]
openai.OpenAI().chat.completions.create(model="stub", messages=messages)
"""


class Learner(StillLearner):
    """Remembers the tokens of each row. `plan` is what happens one after the other, each at its moment of a step at
    which the network is `whole`."""

    rule = Rule()

    def __init__(self, *plan: tuple[str, Callable[[], object]], whole: Callable[[], bool] = lambda: True) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.plan, self.whole = list(plan), whole

    def now(self, moment: str) -> None:
        if self.plan and self.plan[0][0] == moment and self.whole():
            self.plan.pop(0)[1]()

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        self.rows += [(*row.prompt.tolist(), *row.response.tolist()) for row in rows]
        self.now("train")
        return super().train(rows)

    def save(self, batches: Mapping[str, Any]) -> None:
        self.now("save")

    def push(self) -> None:
        if self.version:  # and not at the start
            self.now("push")


class Site:
    """A daemon, its engine, a trainer and agents, each on a host of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.said, self._stack = folder, list[str](), stack
        self.timers: list[threading.Timer] = []
        self.hosts = stack.enter_context(Hosts("daemon", "engine", "trainer", "agents"))
        self.servers, trainers = Authority(folder, "servers"), Authority(folder, "trainers")
        self._clients, self._shown = trainers.file, trainers.sign("trainer-1")
        options = ("--model", "stub", "--delay", "0.02", "--host", "0.0.0.0", "--port", "8000")
        stack.enter_context(stub_process(*options, inside=self.hosts.inside("engine")))
        self.daemon = self.start()

    def start(self) -> ProxyProcess:
        """The daemon, on the data directory that it had."""
        address, engine = self.hosts.address("daemon"), self.hosts.address("engine")
        own = self.servers.sign("daemon", address=address)
        options = ["--listen", f"{address}:8484", "--tls-cert", own.cert, "--tls-key", own.key]
        proxy = ProxyProcess(
            f"http://{engine}:8000", self.folder / "data", port=8484, inside=self.hosts.inside("daemon"),
            options=[*options, "--tls-client-ca", self._clients, "--group-size", str(SIZE)],
            env={"AJET_ADMIN_SECRET": SECRET, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        proxy.url = f"https://{address}:8484"
        return self._stack.enter_context(proxy)

    def reboot(self) -> None:
        """The host of the daemon is gone at once, and comes up again with another daemon."""

        def again() -> None:
            self.hosts.start("daemon")
            self.daemon = self.start()

        self.hosts.lose("daemon")
        self.daemon.kill()
        self._later(again)

    def cut(self, *, back: bool = True) -> None:
        """The way from the daemon to the trainer is lost for a while; and the way back, unless said otherwise."""
        self.hosts.cut("daemon", "trainer", back=back)
        self._later(lambda: self.hosts.mend("daemon", "trainer", back=back))

    def _later(self, action: Callable[[], None]) -> None:
        self.timers.append(threading.Timer(CUT_S, action))
        self.timers[-1].start()

    def whole(self) -> bool:
        """True if no way is lost."""
        return not any(timer.is_alive() for timer in self.timers)

    def status(self) -> dict[str, Any]:
        """The daemon's word on itself on its own host."""
        trusted, key = ssl.create_default_context(cafile=self.servers.file), {"Authorization": f"Bearer {SECRET}"}
        with self.hosts.at("daemon"), httpx.Client(verify=trusted, headers=key, trust_env=False, timeout=300.0) as http:
            found: dict[str, Any] = http.get(f"{self.daemon.url}/ajet/v1/status").json()
        return found

    def config(self, **options: Any) -> Config:
        return Config(
            model="none", model_name="stub", proxy_url=self.daemon.url, key=self.daemon.key("trainer"),
            tls_cert=self._shown.both, run_dir=str(self.folder / "run"), group_size=SIZE, save_freq=1, **options,
        )  # fmt: skip

    def link(self, config: Config, patch: pytest.MonkeyPatch) -> Link:
        """As `Link.of`, but for limits that are shorter than a cut."""
        patch.setenv("SSL_CERT_FILE", self.servers.file)
        return Link(
            config.proxy_url, model=config.model_name, key=config.key, tls=tls_context(config), certified=True,
            deadline_s=300.0, answer_s=1.0,
        )  # fmt: skip

    def train(self, learner: Learner, config: Config, done: Callable[[], bool]) -> None:
        """A whole run on the trainer's host."""

        def say(line: str) -> None:
            self.said.append(line)
            if line.startswith("step "):
                learner.now("said")

        give_up = time.monotonic() + 300
        with (
            pytest.MonkeyPatch.context() as patch, self.hosts.at("trainer"),
            closing(self.link(config, patch)) as link, Keeper(link, LEASE_S) as keeper,
        ):
            link.meet()
            progress = Progress(config.run_dir, config.total_steps, say)
            run = Run(
                config, link, learner, keeper, progress,
                stopping=lambda: done() or time.monotonic() > give_up,
            )  # fmt: skip
            try:
                run.start()
                run.loop()
            finally:
                run.close()
                for timer in self.timers:
                    timer.join()
            assert run.batches.unacknowledged == (), self.said

    def check(self, learner: Learner, seen: Sequence[tuple[int, ...]]) -> None:
        """Everything that agents saw is trained once, nothing else is, and the daemon knows."""
        assert Counter(learner.rows) == Counter(seen), self.said
        found = self.status()
        assert found["episodes"]["trained"] == found["episodes"]["opened"] == TASKS * SIZE, (found, self.said)
        known = found["models"]["stub"]
        assert (known["gate"], known["policy_version"]) == ("open", learner.version), self.said
        assert "Traceback" not in self.daemon.errors()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def play(site: Site, seen: list[tuple[int, ...]], limit: float = 20.0) -> None:
    """`TASKS` whole groups; what was seen of each call. Who hears nothing for `limit` asks again."""
    url, key = site.daemon.url, site.daemon.key("agent")
    trusted = ssl.create_default_context(cafile=site.servers.file)
    with (
        site.hosts.at("agents"),
        httpx.Client(base_url=url, verify=trusted, headers={"Authorization": f"Bearer {key}"}, timeout=limit) as http,
        openai.DefaultHttpxClient(verify=trusted) as carrier,
    ):
        for task in range(TASKS):
            for index in range(SIZE):
                base = f"{url}/e/run-{task}-{index}/v1"
                agent = openai.OpenAI(base_url=base, api_key=key, http_client=carrier, timeout=limit, max_retries=9)
                seen.append(insist(lambda a=agent, w=f"{task} {index}", t=f"t{task}": ask(a, w, t)))  # type: ignore[misc]
                reward = {"value": float(index), "id": "mine"}
                path = f"/ajet/v1/episodes/run-{task}-{index}/rewards"
                insist(lambda p=path, r=reward: http.post(p, json=r).raise_for_status())  # type: ignore[misc]


def ask(agent: openai.OpenAI, word: str, task: str) -> tuple[int, ...]:
    """The tokens of a streamed call, prompt and answer."""
    prompt: Sequence[int] = ()
    ids: list[int] = []
    with agent.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": word}], stream=True, max_tokens=8,
        extra_body={"return_token_ids": True}, extra_headers={"X-AJet-Task": task},
    ) as stream:  # fmt: skip
        for event in stream:
            prompt = getattr(event, "prompt_token_ids", None) or prompt
            ids += getattr(event.choices[0], "token_ids", None) or []
    return (*prompt, *ids)


def insist(action: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + 300
    while True:
        try:
            return action()
        except (openai.APIError, httpx.HTTPError, OSError):
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def playing(site: Site, seen: list[tuple[int, ...]], limit: float = 20.0) -> threading.Thread:
    thread = threading.Thread(target=play, args=(site, seen, limit))
    thread.start()
    return thread


def all_played(site: Site) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    play(site, seen)
    return seen


def test_a_trainer_that_cannot_reach_the_daemon_waits_and_trains_everything_once(site: Site) -> None:
    """Each time for longer than the lease: while it trains, while the answer alone to its acknowledgement is lost,
    while the gate is closed, and before it closes it."""
    seen = all_played(site)
    moments = (
        ("train", site.cut), ("said", lambda: site.cut(back=False)), ("push", site.cut),
        ("save", lambda: site.cut(back=False)),
    )  # fmt: skip
    learner = Learner(*moments, whole=site.whole)
    site.train(learner, site.config(groups=1), lambda: len(learner.rows) == len(seen))
    assert len(site.timers) == len(moments), site.said
    site.check(learner, seen)


def test_a_daemon_whose_host_reboots_is_taken_up_again_by_everyone(site: Site) -> None:
    seen: list[tuple[int, ...]] = []
    agent = playing(site, seen, limit=10.0)
    learner = Learner(("train", site.reboot))
    site.train(learner, site.config(groups=2), lambda: len(learner.rows) >= TASKS * SIZE)
    agent.join()
    assert len(site.timers) == 1
    site.check(learner, seen)


def test_agents_bear_a_network_that_comes_back(site: Site) -> None:
    """In the middle of a stream, while a reward is on its way, and in a program of ``ajet run``."""
    seen: list[tuple[int, ...]] = []
    env = clean(
        AJET_PROXY_URL=site.daemon.url, AJET_API_KEY=site.daemon.key("agent"), SSL_CERT_FILE=site.servers.file,
        PYTHONPATH=str(ROOT),
    )  # fmt: skip
    command = [*site.hosts.inside("agents"), *RUN, "--", sys.executable, "-c", PROGRAM]
    agent = playing(site, seen)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as program:
        for _ in range(3):
            time.sleep(1.0)
            site.hosts.cut("daemon", "agents")
            time.sleep(1.5)
            site.hosts.mend("daemon", "agents")
        assert program.stdout is not None
        assert "2 rewarded, mean reward 1" in program.stdout.read()
        assert program.wait() == 0
    agent.join()
    found = site.status()["episodes"]
    assert found["ready"] + found["sealed"] == found["opened"] == TASKS * SIZE + 2
    assert len(seen) == TASKS * SIZE


def test_a_word_to_the_gate_that_comes_too_late_opens_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is given up, but its system goes on sending: at 3.0 s, at 6.2 s …, in the middle of a push."""
    all_played(site)
    gates: list[str] = []
    real = Link.open_gate

    def open_gate(link: Link, version: int) -> Sequence[str]:
        if version == 2 and not site.timers:
            site.cut()
        return real(link, version)

    def push() -> None:
        end = time.monotonic() + 8.0
        while time.monotonic() < end:
            gates.append(site.status()["models"]["stub"]["gate"])
            time.sleep(0.1)

    monkeypatch.setattr(Link, "open_gate", open_gate)
    learner = Learner(("push", lambda: None), ("push", lambda: None), ("push", push))
    site.train(learner, site.config(groups=1), lambda: learner.version == 4)
    assert set(gates) == {"closed"}, gates
