"""A team against the real proxy: agents that ask for their own names as models, a teacher, and who learned what."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk.frame import decode_batch
from ajet_sdk.play import patience
from tests.kit.asking import ASK
from tests.kit.patience import until
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.sdk.conftest import Ajet

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")

TEAM = {"planner": "p-model", "critic": "c-model"}
AGENT = f"""{ASK}
for name in ("planner", "tutor", "critic", "planner"):
    ask("I am the " + name, model=name)
"""


@pytest.fixture(scope="module")
def running(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    named = [word for model in (*TEAM.values(), "judge") for word in ("--upstream", f"{model}={engine}")]
    with ProxyProcess(None, tmp_path_factory.mktemp("team") / "data", options=named) as process:
        yield process


@pytest.fixture
def rig(running: ProxyProcess, ajet: Ajet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("AJET_PROXY_URL", running.url)
    with Rig(running.url) as hands:
        yield hands


def leased(rig: Rig, model: str, **body: Any) -> Any:
    """The batch that the trainer of `model` leases; None if there is nothing."""
    answer = rig.post("/batches/lease", {"model": model, "group_size": 1, **body})
    assert answer.status_code in (200, 204), answer.text
    return decode_batch(answer.content) if answer.status_code == 200 else None


def test_each_trainer_leases_its_agents_calls_and_the_teachers_are_never_trained(
    rig: Rig, ajet: Ajet, tmp_path: Path
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    team = [word for agent, model in TEAM.items() for word in ("--agent-model", f"{agent}={model}")]
    told = ("run", "--task", "plan/1", "--repeat", "2", *team, "--teacher", "tutor=judge")
    code, out, err = ajet(*told, "--", sys.executable, str(program))
    assert (code, "2 episodes: 2 rewarded" in out) == (0, True), out + err
    episodes = [one["episode"] for one in rig.get("/episodes?task=plan/1").json()["episodes"]]
    assert len(episodes) == 2
    for episode in episodes:
        asked = [(call["agent"], call["model"], call["complete"]) for call in rig.record(episode)["calls"]]
        assert asked == [
            ("planner", "p-model", True), ("tutor", "judge", True), ("critic", "c-model", True),
            ("planner", "p-model", True),
        ]  # fmt: skip
    assert leased(rig, "judge") is None
    for number, (agent, model) in enumerate(TEAM.items()):
        batch = leased(rig, model, groups=2)
        samples = [sample for group in batch.groups for one in group.episodes for sample in one.samples]
        assert {(sample.agent, sample.model) for sample in samples} == {(agent, model)}
        assert sum(len(sample.calls) for sample in samples) == (4 if agent == "planner" else 2)
        assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": number + 1}).is_success
    for episode in episodes:
        record = rig.record(episode)
        assert (record["state"], record["teachers"]) == ("trained", {"tutor": "judge"})
        models = record["models"].items()
        assert [(name, one["calls"], one.get("share"), one.get("policy_version")) for name, one in models] == [
            ("p-model", 2, "trained", 1), ("judge", 1, None, None), ("c-model", 1, "trained", 2),
        ]  # fmt: skip
    code, out, _ = ajet("show", episodes[0])
    rows = [line.split() for line in out.splitlines()]
    assert ["p-model", "2", "8", "1", "trained,", "policy", "version", "1"] in rows
    assert ["judge", "1", "4", "1", "nothing"] in rows


def give(ajet: Ajet, way: str, rig: Rig, episode: ajet_sdk.Episode, value: float, **of: str) -> None:
    """A reward that is not final, for an `agent` or a `model`."""
    if way == "sdk":
        episode.reward(value, final=False, **of)  # type: ignore[arg-type]
    elif way == "http":
        assert rig.reward(episode.id, value, final=False, **of).is_success
    elif way == "header":
        headers = {"X-AJet-Reward": str(value), **{f"X-AJet-Reward-{name.title()}": said for name, said in of.items()}}
        assert rig.http.get(f"/e/{episode.id}/v1/models", headers=headers).is_success
    else:
        words = [word for name, said in of.items() for word in (f"--{name}", said)]
        assert ajet("reward", str(value), *words, "--not-final", "--episode", episode.id)[0] == 0


@pytest.mark.parametrize("way", ["sdk", "http", "header", "command"])
def test_rewards_by_agent_and_by_model_reach_their_trainers_alone(rig: Rig, ajet: Ajet, way: str) -> None:
    with ajet_sdk.episode(f"rewards/{way}", members=TEAM) as episode:
        for name in TEAM:
            assert rig.chat(episode.id, model=name).is_success
        give(ajet, way, rig, episode, 0.25, model="p-model")
        give(ajet, way, rig, episode, 0.5, model="c-model")
        give(ajet, way, rig, episode, 2.0, agent="critic")
    mine = {"p-model": 0.25, "c-model": 2.5}
    for model, reward in mine.items():
        batch = leased(rig, model)
        ((one,),) = (group.episodes for group in batch.groups)
        (sample,) = one.samples
        assert (one.episode, sample.reward) == (episode.id, reward)
        assert {given.get("model", model) for given in one.rewards} == {model}
        assert [given["agent"] for given in one.rewards if "agent" in given] == ["critic"] * (model == "c-model")
        assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": 3}).is_success
    assert rig.record(episode.id)["state"] == "trained"


def test_a_model_that_no_engine_serves_is_named(rig: Rig, ajet: Ajet) -> None:
    known = "there are engines for 'c-model', 'judge', 'p-model'"
    for kind in ("members", "teachers"):
        answer = rig.post("/episodes", {kind: {"planner": "p-modle"}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert answer.json()["error"]["message"] == f"no engine serves 'p-modle', the model of 'planner'; {known}"
    answer = rig.post("/episodes", {"model": "p-modle"})
    assert answer.json()["error"]["message"] == f"no engine serves 'p-modle', the model of the episode; {known}"
    assert rig.post("/episodes", {"members": {"planner": "x"}, "place": "no"}).status_code == 400
    for word in (("--agent-model", "planner=p-modle"), ("--model", "p-modle")):
        code, _, err = ajet("try", *word, "--", "true")
        assert (code, known in err, len(err.splitlines())) == (1, True, 1)


def test_before_any_trainer_has_come_no_episode_of_a_team_opens(tmp_path: Path) -> None:
    """Its calls would go to the engine of the model whose trainer comes first. An episode of one model opens."""
    with ProxyProcess(None, tmp_path / "data") as proxy, Rig(proxy.url) as rig:
        answer = rig.post("/episodes", {"members": TEAM})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert answer.json()["error"]["message"].endswith("there are engines for none yet")
        assert rig.get("/status").json()["episodes"]["opened"] == 0
        assert rig.post("/episodes", {"model": "planner"}).is_success


def test_a_run_waits_for_a_trainer_that_has_yet_to_come_and_says_so(
    rig: Rig, engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is started first: no episode is spoilt."""
    monkeypatch.setattr(patience, "LONG_S", 0.0)

    def agent(_task: Any, episode: ajet_sdk.Episode) -> float:
        return float(rig.chat(episode.id, model="late").is_success)

    def comes() -> None:
        assert until(lambda: "waiting: no engine serves 'second'" in caplog.text)
        assert rig.post("/policy", {"model": "second", "version": 1, "upstreams": [engine]}).is_success

    coming = threading.Thread(target=comes)
    coming.start()
    results = ajet_sdk.run(agent, ["t"], repeat=2, members={"early": "p-model", "late": "second"})
    coming.join()
    assert (results.rewards, results.failures) == ([1.0, 1.0], [])


def test_a_team_plays_what_a_trainers_evaluation_wants(rig: Rig, engine: str) -> None:
    """Its episodes count for the model whose evaluation wants them."""
    assert rig.post("/policy", {"model": "p-model", "version": 4}).is_success
    name = rig.post("/evaluations", {"model": "p-model", "episodes": 2}).json()["evaluation"]
    rig.post("/policy", {"model": "other", "version": 1, "upstreams": [engine]})
    rig.post("/evaluations", {"model": "other", "episodes": 1})

    class Enough(Exception):
        """The evaluation has what it wants."""

    def agent(_task: Any, episode: ajet_sdk.Episode) -> float:
        return float(rig.chat(episode.id, model="critic").is_success)

    def on_result(_result: Any) -> None:
        if rig.get(f"/evaluations/{name}").json()["done"] == 2:
            raise Enough

    with pytest.raises(Enough):
        ajet_sdk.run(agent, ["t"], 1, 1, members=TEAM, eval=True, wanted=True, on_result=on_result)
    assert rig.get("/wanted").json()["eval"] == {"other": 1}
