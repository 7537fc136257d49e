"""Two models learn from the same episodes by `ajet_trainer`'s own runs at a whole daemon; one dies, or never comes.

Each has an engine of its own, and a scripted learner in a run. Every request, answer and part of a step is an instant
at which it can die. Then nothing more of it is heard, and its next life has its checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_trainer.config import Config
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress
from ajet_trainer.step import Run
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig
from tests.kit.stub_process import stub_process
from tests.trainer.scripted_learner import Disk, Instants, Killed, ScriptedLearner

MODELS = ("planner", "coder")
MEMBERS = {"plans": "planner", "codes": "coder"}
GROUP, LEASE_S, SHORT_S = 2, 300.0, 1.0
"""A trainer that dies has the short lease, so that its next life need not wait for long."""
STATIONS = {
    "before close", "close answered", "before policy", "policy answered", "before mix", "mix answered", "before open",
    "open answered", "before lease", "lease answered", "before training", "after training",
    "before the checkpoint is complete", "after the checkpoint is complete", "before the push", "after the push",
    "before ack", "ack answered",
}  # fmt: skip
"""Where a trainer can die."""


class Learner(ScriptedLearner):
    """Its weights are the names of the episodes whose gradient they hold."""

    colocated = False

    def save(self, batches: Mapping[str, Any]) -> None:
        taken = (name for one in batches["saved"] if one["version"] > self.disk.version for name in one["episodes"])
        self.weights = [*self.disk.weights, *taken]
        super().save(batches)


class MortalLink(Link):
    """Each request and each answer is an instant, but for those that come at any time."""

    instants: Instants

    def _send(self, path: str, body: Any = None, **more: Any) -> bytes | None:
        if path == "/status" or path.endswith("/extend"):
            return super()._send(path, body, **more)
        what = path.rsplit("/", 1)[1]
        self.instants.pass_by(f"before {what}")
        answer = super()._send(path, body, **more)
        self.instants.pass_by(f"{what} answered")
        return answer


class Trainer:
    """The trainer of one model, in all its lives."""

    def __init__(self, proxy: ProxyProcess, model: str, folder: Path, **options: Any) -> None:
        self.model, self.disk, self.lease_s = model, Disk(), LEASE_S
        usual: dict[str, Any] = {"ahead": 0, "groups": 1, "group_size": GROUP, "save_freq": 1}
        self.config = Config(
            model="none", model_name=model, proxy_url=proxy.url, run_dir=str(folder / model), **usual | options
        )

    @contextmanager
    def life(self, instants: Instants, steps: int = 0) -> Iterator[Run]:
        """A run that is done once it has made so many `steps` in all, if any; it may be killed. It does not wait for
        longer than ten minutes for what does not come."""
        learner, give_up = Learner(self.disk, instants), time.monotonic() + 600
        plain = httpx.HTTPTransport(verify=False)  # saves the time to read certificates
        link = MortalLink(self.config.proxy_url, model=self.model, transport=plain)
        link.instants = instants
        progress = Progress(self.config.run_dir, steps, lambda line: None)
        with closing(link), Keeper(link, self.lease_s) as keeper, suppress(Killed):
            yield Run(
                self.config, link, learner, keeper, progress,
                stopping=lambda: 0 < steps <= learner.version or time.monotonic() > give_up,
            )  # fmt: skip

    def lives(self, instants: Instants | None = None, steps: int = 1) -> None:
        """A life of so many steps, which is not ended in order."""
        with self.life(instants or Instants()) as run:
            run.start()
            for _ in range(steps):
                run.step()

    def until(self, steps: int) -> None:
        """A life that ends in order after so many steps in all."""
        with self.life(Instants(), steps) as run:
            run.start()
            run.loop()
            run.close()


@dataclass
class Team:
    """One daemon, an engine and a trainer for each model, and who plays."""

    proxy: ProxyProcess
    rig: Rig
    engines: dict[str, ExitStack]
    trainers: dict[str, Trainer]
    groups: int = 0

    def play(self, groups: int = 1) -> None:
        """Whole groups of episodes of both models. Who opens one waits until its lane has room."""
        for number in range(groups * GROUP):
            body = {"task": f"t{self.groups + number // GROUP}", "members": MEMBERS, "hold_s": 5}
            while (opened := self.rig.post("/episodes", body)).status_code == 503:
                assert opened.json()["error"]["code"] == "lane_full"
            episode = opened.json()["episode"]
            assert [self.ask(model, episode) for model in MODELS] == [200, 200]
            assert self.rig.reward(episode).is_success
        self.groups += groups

    def ask(self, model: str, episode: str | None = None) -> int:
        """The status of a call, by default one of an episode that nobody rewards."""
        return self.rig.chat(episode or f"of-{model}", model=model, max_tokens=8).status_code

    def gate(self, model: str) -> str:
        return str(self.rig.status()["models"][model]["gate"])

    def trained(self) -> dict[str, list[str]]:
        """The episodes that each model has trained, by the ledger, after a check that its sums hold and that it says
        nothing that the weights do not hold."""
        self.rig.status()
        records = self.rig.get("/episodes", params={"limit": 1000}).json()["episodes"]
        by_model: dict[str, list[str]] = {}
        for model, trainer in self.trainers.items():
            weights = trainer.disk.weights
            assert len(set(weights)) == len(weights), f"{model} has trained an episode twice"
            by_model[model] = [one["episode"] for one in records if one.get("shares", {}).get(model) == "trained"]
            assert set(by_model[model]) <= set(weights)
        for one in records:
            assert (one["state"] == "trained") == (set(one.get("shares", {}).values()) == {"trained"}), one
        return by_model

    def in_the_end(self) -> None:
        """Each model trains what is left, and has then trained every group once."""
        for trainer in self.trainers.values():
            trainer.until(self.groups)
        by_model = self.trained()
        for model, trainer in self.trainers.items():
            assert sorted(by_model[model]) == sorted(trainer.disk.weights)
            assert len(by_model[model]) == GROUP * self.groups


def engine(model: str) -> tuple[ExitStack, str]:
    """An engine that lasts until the stack is closed, and its URL."""
    stack = ExitStack()
    return stack, stack.enter_context(stub_process("--model", model))


@contextmanager
def team(folder: Path, *options: str, **trainers: Any) -> Iterator[Team]:
    """`options` are the daemon's, `trainers` those of both trainers."""
    with ExitStack() as stack:
        engines = {model: engine(model) for model in MODELS}
        for running, _ in engines.values():
            stack.push(running)
        upstreams = [word for model, (_, url) in engines.items() for word in ("--upstream", f"{model}={url}")]
        proxy = ProxyProcess(None, folder / "data", options=[*upstreams, "--group-size", str(GROUP), *options])
        stack.enter_context(proxy)
        yield Team(
            proxy, stack.enter_context(Rig(proxy.url)), {model: running for model, (running, _) in engines.items()},
            {model: Trainer(proxy, model, folder, **trainers) for model in MODELS},
        )  # fmt: skip


@pytest.mark.parametrize(("dying", "living"), [MODELS, MODELS[::-1]])
def test_a_run_that_is_killed_at_any_instant_holds_up_its_own_agents_alone(
    tmp_path: Path, dying: str, living: str
) -> None:
    """After each death the other makes a step, and its agents are answered. Who waits at the dead one's gate is
    answered in its next life."""
    deaths, shut = list[str](), Counter[bool]()
    with team(tmp_path) as us, us.trainers[living].life(Instants()) as alive, ThreadPoolExecutor(1) as agent:
        us.trainers[dying].lease_s = SHORT_S
        alive.start()
        us.trainers[dying].lives(steps=0)
        while True:
            us.play()
            instants = Instants(len(deaths))
            us.trainers[dying].lives(instants)
            if instants.seen <= len(deaths):
                break
            deaths.append(instants.names[-1])
            shut[us.gate(dying) == "closed"] += 1
            held = agent.submit(us.ask, dying)
            alive.step()
            assert us.ask(living) == 200
            us.trainers[dying].lives(steps=0)
            assert held.result(timeout=300) == 200
            us.trained()
        assert set(deaths) == STATIONS
        assert min(shut.values()) > 4 and len(shut) == 2
        assert alive.learner.version == len(deaths)
        alive.close()
        us.in_the_end()


def test_a_model_whose_trainer_never_comes_holds_up_no_player(tmp_path: Path) -> None:
    """Agents may be one group ahead, and its shares stay ready. If it comes at last, it is given all of them. Only
    whole groups are trained, or a slow player would lose some."""
    early, late = MODELS
    with team(tmp_path, ahead=1, min_group_size=0, group_wait_s=0.2) as us, ThreadPoolExecutor(1) as players:
        playing = players.submit(us.play, 4)
        with us.trainers[early].life(Instants()) as run:
            run.start()
            for _ in range(4):
                run.step()
            playing.result(timeout=300)
            run.close()
        assert {model: len(names) for model, names in us.trained().items()} == {early: 4 * GROUP, late: 0}
        us.in_the_end()


def test_an_engine_that_is_lost_is_no_matter_to_a_trainer_that_freezes_its_own(tmp_path: Path) -> None:
    with team(tmp_path, "--gate-mode", "pause") as us:
        us.play(2)
        us.engines["coder"].close()
        assert us.ask("coder") == 502
        us.trainers["planner"].lives(steps=2)
        assert us.ask("planner") == 200
        assert {model: len(names) for model, names in us.trained().items()} == {"planner": 2 * GROUP, "coder": 0}
        us.engines["coder"], url = engine("coder")
        with us.engines["coder"]:
            us.rig.post("/policy", {"model": "coder", "version": 0, "upstreams": [url]}).raise_for_status()
            us.play()
            us.in_the_end()
