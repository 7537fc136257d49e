"""Bad days of a team, at a whole daemon: two models with a trainer each, of which one dies, is late, lies or is lost.

A trainer is a script of requests that ends anywhere. What it has checkpointed outlives it, and its next life begins as
`ajet_trainer.step` does: it acknowledges that, and then opens its gate.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.io.http import keyring
from ajet_sdk.frame import decode_batch
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig, error_of
from tests.kit.stub_process import stub_process

MEMBERS = {"plans": "planner", "codes": "coder"}
MODELS = tuple(MEMBERS.values())
INSTANTS = (
    "before a lease", "during a lease", "after a lease", "after training", "after a checkpoint", "during a close",
    "after a close", "after an open", "during an ack", "after an ack",
)  # fmt: skip
TASKS = count()


class Dead(Exception):
    """The trainer ends here."""


class Trainer:
    """The trainer of one model. It ends at the instant `dies`. `weights` and `saved` are in its checkpoint."""

    def __init__(self, rig: Rig, model: str) -> None:
        self.rig, self.model, self.dies = rig, model, ""
        self.version = 0
        self.weights: list[str] = []
        self.saved: str | None = None
        self.rig.post("/policy", {"model": model, "version": 0}).raise_for_status()

    def step(self, refused: str | None = None) -> None:
        """One step. `refused` is an episode that is too long for it."""
        self._at("before a lease")
        asked = {"model": self.model, "group_size": 2, "lease_s": 0.3}
        self._cut("during a lease", "/batches/lease", asked | {"wait_s": 5})
        batch = decode_batch(self.rig.post("/batches/lease", asked | {"wait_s": 30}).raise_for_status().content)
        self._at("after a lease")
        episodes = [one.episode for group in batch.groups for one in group.episodes if one.episode != refused]
        self._at("after training")
        self.weights += episodes
        self.saved, self.version = batch.batch, self.version + 1
        self._at("after a checkpoint")
        self._cut("during a close", "/gate/close", {"model": self.model})
        self.rig.post("/gate/close", {"model": self.model, "wait_s": 5}).raise_for_status()
        self._at("after a close")
        self.rig.post("/gate/open", {"model": self.model, "policy_version": self.version}).raise_for_status()
        self._at("after an open")
        filtered = {"filtered": {refused: "too_long: 9 tokens"}} if refused else {}
        self._cut("during an ack", f"/batches/{self.saved}/ack", {"policy_version": self.version} | filtered)
        self._ack(**filtered)
        self._at("after an ack")
        self.saved = None

    def trains(self, names: list[str]) -> None:
        """Steps until its share of each of these is trained."""
        while not set(names) <= set(self.weights):
            self.step()

    def dies_at(self, instant: str) -> None:
        self.dies = instant
        with pytest.raises(Dead):
            self.step()

    def begins_again(self, names: list[str]) -> None:
        """Its next life, until its share of each of these is trained."""
        self.dies = ""
        if self.saved is not None:
            self._ack()
            self.saved = None
        self.rig.post("/gate/open", {"model": self.model, "policy_version": self.version}).raise_for_status()
        self.trains(names)

    def _ack(self, **more: Any) -> None:
        body = {"policy_version": self.version} | more
        assert self.rig.post(f"/batches/{self.saved}/ack", body).raise_for_status().json()["state"] == "trained"

    def _at(self, instant: str) -> None:
        if self.dies == instant:
            raise Dead(instant)

    def _cut(self, instant: str, path: str, body: dict[str, Any]) -> None:
        """A request whose answer nobody reads: the process is gone once it has sent it."""
        if self.dies == instant:
            sent = json.dumps(body).encode()
            head = f"POST /ajet/v1{path} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
            with socket.create_connection((self.rig.http.base_url.host, self.rig.http.base_url.port or 0)) as wire:
                wire.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            raise Dead(instant)


class Team:
    """A daemon with a trainer for each model."""

    def __init__(self, rig: Rig, proxy: ProxyProcess) -> None:
        self.rig, self.proxy = rig, proxy
        self.trainers = {model: Trainer(rig, model) for model in MODELS}

    def episodes(self, members: dict[str, str] = MEMBERS, number: int = 2) -> list[str]:
        """A group of episodes that are ready for all their members."""
        task = f"task {next(TASKS)}"
        names = [self.rig.open(task=task, members=members) for _ in range(number)]
        for name in names:
            for model in members.values():
                self.answered(name, model)
            assert self.rig.reward(name).is_success
        return names

    def answered(self, name: str, model: str) -> None:
        """An agent's call has its answer. The rig would wait for it for long."""
        assert self.rig.chat(name, model=model, max_tokens=8).status_code == 200

    def shares(self, names: list[str]) -> list[tuple[str, dict[str, str]]]:
        records = [self.rig.record(name) for name in names]
        return [(record["state"], record.get("shares", {})) for record in records]

    def trained(self, names: list[str]) -> None:
        """All of these, once by each model; and no gate is shut."""
        assert self.shares(names) == [("trained", dict.fromkeys(MODELS, "trained"))] * len(names)
        for trainer in self.trainers.values():
            assert [trainer.weights.count(name) for name in names] == [1] * len(names)
        status = self.rig.status()
        assert status["gate"]["state"] == "open" and status["episodes"]["leased"] == 0


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, str]]:
    """An engine for each model, and for one that has no trainer."""
    with ExitStack() as stack:
        yield {model: stack.enter_context(stub_process("--model", model)) for model in (*MODELS, "judge")}


def of(engines: dict[str, str]) -> list[str]:
    return [part for model, url in engines.items() for part in ("--upstream", f"{model}={url}")]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, engines: dict[str, str]) -> Iterator[ProxyProcess]:
    with ProxyProcess(None, tmp_path_factory.mktemp("team") / "data", options=of(engines)) as running:
        yield running


@pytest.fixture
def team(proxy: ProxyProcess) -> Iterator[Team]:
    with Rig(proxy.url) as rig:
        yield Team(rig, proxy)


@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_dies_at_an_instant_and_the_other_goes_on(team: Team, model: str, instant: str) -> None:
    (other,) = set(MODELS) - {model}
    both = team.episodes()
    team.trainers[model].dies_at(instant)
    later = team.episodes({"alone": other})
    team.trainers[other].trains([*both, *later])
    assert [shares[other] for _, shares in team.shares([*both, *later])] == ["trained"] * 4
    team.trainers[model].begins_again(both)
    team.trained(both)


def test_a_model_whose_trainer_never_comes_holds_up_nobody(team: Team) -> None:
    names = team.episodes(MEMBERS | {"judges": "judge"})
    for trainer in team.trainers.values():
        trainer.step()
    assert team.shares(names) == [("ready", dict.fromkeys(MODELS, "trained") | {"judge": "ready"})] * 2
    for model in MODELS:
        assert team.rig.post("/gate/close", {"model": model}).is_success
    open_one = team.rig.open(model="judge")
    team.answered(open_one, "judge")  # no gate is its own, and no engine of it is another's
    for model in MODELS:
        assert team.rig.post("/gate/open", {"model": model, "policy_version": 1}).is_success
    assert team.rig.post(f"/episodes/{open_one}/abort").is_success
    team.rig.status()


def test_a_trainer_that_names_anothers_model_is_refused_and_changes_nothing(team: Team) -> None:
    names = team.episodes()
    answer = team.rig.post("/batches/lease", {"model": "coder", "group_size": 2, "lease_s": 60})
    batch = decode_batch(answer.content).batch
    before = team.rig.status()
    key = keyring.keys(team.proxy.data_dir).issue(Claims("trainer", model="planner"))
    with Rig(team.proxy.url, key) as foreign:
        for path, body in (
            ("/batches/lease", {"model": "coder"}), (f"/batches/{batch}/ack", {"policy_version": 9}),
            (f"/batches/{batch}/nack", {}), (f"/batches/{batch}/extend", {"lease_s": 0.1}),
            ("/gate/close", {"model": "coder"}), ("/policy", {"model": "coder", "version": 9}),
        ):  # fmt: skip
            assert error_of(foreign.post(path, body), 403)["code"] == "foreign_model"
        after = team.rig.status()
        assert [after[name] for name in ("models", "episodes", "gate")] == [
            before[name] for name in ("models", "episodes", "gate")
        ]
        team.trainers["planner"].rig = foreign
        team.trainers["planner"].trains(names)
    assert team.rig.post(f"/batches/{batch}/ack", {"policy_version": 1}).json()["state"] == "trained"
    assert team.shares(names) == [("trained", dict.fromkeys(MODELS, "trained"))] * 2


@pytest.mark.parametrize("first", MODELS)
def test_a_share_that_one_trainer_refuses_is_trained_by_the_other(team: Team, first: str) -> None:
    names = team.episodes()
    order = sorted(MODELS, key=lambda model: model != first)
    for model in order:
        team.trainers[model].step(refused=names[0] if model == "coder" else None)
    assert team.shares(names) == [
        ("trained", {"planner": "trained"}), ("trained", dict.fromkeys(MODELS, "trained")),
    ]  # fmt: skip
    assert (team.trainers["planner"].weights, team.trainers["coder"].weights) == (names, names[1:])


def test_what_all_trainers_refuse_is_discarded(team: Team) -> None:
    names = team.episodes()
    for trainer in team.trainers.values():
        trainer.step(refused=names[0])
    refused = team.rig.record(names[0])
    assert (refused["state"], refused["reason"]) == ("discarded", "filtered")


def test_the_engine_of_one_model_is_lost_and_comes_back(tmp_path: Path, engines: dict[str, str]) -> None:
    port = str(free_port())
    with ExitStack() as stack:
        lost = stack.enter_context(ExitStack())
        url = lost.enter_context(stub_process("--model", "coder", "--port", port))
        own = stack.enter_context(ProxyProcess(None, tmp_path / "data", options=of(engines | {"coder": url})))
        team = Team(stack.enter_context(Rig(own.url)), own)
        both, half = team.episodes(), team.rig.open(task="half", members=MEMBERS)
        lost.close()
        team.answered(half, "planner")
        error_of(team.rig.chat(half, model="coder"), 502)
        later = team.episodes({"plans": "planner"})
        team.trainers["planner"].trains([*both, *later])
        team.trainers["coder"].trains(both)  # what was sampled is trained, and both gates have moved
        stack.enter_context(stub_process("--model", "coder", "--port", port))
        team.answered(half, "coder")
        assert team.rig.reward(half).is_success
        assert team.rig.record(half)["shares"] == dict.fromkeys(MODELS, "ready")


def test_the_daemon_dies_between_the_two_acknowledgements_of_an_episode(
    tmp_path: Path, engines: dict[str, str]
) -> None:
    with ProxyProcess(None, tmp_path / "data", options=of(engines)) as own, Rig(own.url) as rig:
        team = Team(rig, own)
        names = team.episodes()
        team.trainers["planner"].trains(names)
        team.trainers["coder"].dies_at("after an open")
        before = team.shares(names)
        assert before == [("leased", {"planner": "trained", "coder": "leased"})] * 2
        own.kill()
        own.start()
        assert team.shares(names) in (before, [("ready", {"planner": "trained", "coder": "ready"})] * 2)
        assert rig.post("/batches/lease", {"model": "planner", "group_size": 1}).status_code == 204
        team.trainers["coder"].begins_again(names)
        team.trained(names)
        own.kill()
        own.start()
        team.trained(names)
