"""The SDK against the real proxy: `ajet-proxy serve` as a process, with the scripted engine behind it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import ajet_sdk
from ajet_sdk import Client, aio
from ajet_sdk.play import rollouts
from ajet_sdk.play.episode import Outcome
from ajet_sdk.routes import Evaluate, Policy
from tests.kit.asking import AGENT
from tests.kit.patience import LONG_S
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.sdk.conftest import Ajet

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")

ASK = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def ask(episode: Any, **change: Any) -> httpx.Response:
    """One LLM call of an agent that knows its base URL and key."""
    key = {"Authorization": f"Bearer {episode.api_key}"}
    url = f"{episode.base_url}/chat/completions"
    return httpx.post(url, json=ASK | change, headers=key, timeout=LONG_S, trust_env=False)


def test_an_episode_is_rewarded_and_ready(daemon: ProxyProcess) -> None:
    with ajet_sdk.episode("real/1", metadata={"seed": 7}) as ep:
        answer = ask(ep)
        assert answer.status_code == 200
        assert answer.headers["X-AJet-Episode"] == ep.id
        ep.heartbeat()
        ep.reward(0.5, call=answer.headers["X-AJet-Call"], final=False)
        ep.reward(1.0)
        record = ep.record(tokens=True)
    assert ep.outcome == Outcome(reward=1.5)
    assert (record["state"], record["reward"], record["task"]) == ("ready", 1.5, "real/1")
    (call,) = record["calls"]
    assert call["complete"]
    assert len(call["token_ids"]) == len(call["logprobs"]) == 4


def test_settling_without_a_reward(daemon: ProxyProcess) -> None:
    with ajet_sdk.episode("real/3") as left:
        ask(left)
    with ajet_sdk.episode("real/3") as stepwise:
        ask(stepwise)
        stepwise.reward(0.5, final=False)
    with ajet_sdk.episode("real/3") as empty:
        empty.reward(1.0)
    assert left.outcome == Outcome(aborted="left without a reward")
    assert stepwise.outcome == Outcome(reward=0.5)
    assert empty.outcome == Outcome(reward=1.0, discarded="incomplete_call")
    with Client() as client:
        states = [client.ask("get_episode", id=ep.id).json() for ep in (left, stepwise, empty)]
    assert [(item["state"], item.get("reason")) for item in states] == [
        ("discarded", "aborted"), ("ready", None), ("discarded", "incomplete_call"),
    ]


def test_the_command(daemon: ProxyProcess, ajet: Ajet) -> None:
    code, out, err = ajet("run", "--task", "real/10", "--eval", "--", sys.executable, "-c", AGENT)
    assert code == 0, err
    episode = next(word for word in out.split() if word.startswith("ep-"))
    shown = ajet("show", episode)[1]
    assert f"episode {episode}: recorded" in shown
    assert "1 call\n" in shown
    assert json.loads(ajet("show", episode, "--json")[1])["calls"][0]["token_ids"]
    assert " = open " in ajet("status")[1]
    code, out, err = ajet("run", "--task", "real/11", "--", "true")
    assert code == 0
    assert "incomplete_call" in out
    assert err == (
        "1 of them had no whole answer of a model: does the program use OPENAI_BASE_URL, and see no errors?\n"
    )


def test_an_http_proxy_that_may_stand_between_is_named(
    daemon: ProxyProcess, ajet: Ajet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://0.0.0.0:{daemon.port}"  # this machine, but not by a name that says so
    for name, value in {"AJET_PROXY_URL": url, "HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "0.0.0.0"}.items():
        monkeypatch.setenv(name, value)
    _, _, err = ajet("run", "--task", "real/13", "--", "true")
    assert err.endswith(f"? HTTP_PROXY is set: does that proxy lead to {url}?\n")


def test_a_reward_survives_the_death_of_the_proxy(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyProcess(engine, tmp_path / "data") as proxy:
        with ajet_sdk.episode("real/12", proxy_url=proxy.url) as ep:
            ask(ep)
            proxy.kill()
            reborn: list[float] = []

            async def nap(client: Any, seconds: float) -> None:
                reborn.append(seconds)
                proxy.start()

            monkeypatch.setattr("ajet_sdk.client.Client.sleep", nap)
            ep.reward(1.0)
            assert len(reborn) == 1
        assert ep.outcome == Outcome(reward=1.0)
        with Client(proxy.url) as client:
            record = client.ask("get_episode", id=ep.id).json()
    assert (record["state"], len(record["rewards"])) == ("ready", 1)


async def test_two_clients_play_what_is_wanted_together(daemon: ProxyProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through the tasks once, and play again what failed."""
    monkeypatch.setattr(rollouts, "WANTED_S", 0.05)
    tasks = [f"h{number}" for number in range(6)]
    wanted, post = 6, {"model": "stub", "episodes": 6}
    started: list[str] = []

    async def agent(task: str, episode: aio.Episode) -> float:
        started.append(task)
        await asyncio.sleep(0.05)
        if started.count(task) == 1 and task in ("h1", "h5"):
            raise RuntimeError("no idea")
        return 0.5

    async with httpx.AsyncClient(base_url=f"{daemon.url}/ajet/v1", timeout=LONG_S, trust_env=False) as http:
        name = (await http.post("/evaluations", json=post)).json()["evaluation"]
        both = [
            asyncio.ensure_future(aio.run(agent, tasks, 1, eval=True, wanted=True, parallel=3)) for _ in range(2)
        ]
        told: dict[str, Any] = {"done": 0}
        while told["done"] < wanted:
            await asyncio.sleep(0.05)
            told = (await http.get(f"/evaluations/{name}")).json()
        await asyncio.sleep(0.3)
        for running in both:
            running.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        assert (told["opened"], told["rewards"]) == (wanted, [0.5] * wanted)
        assert sorted(started) == sorted([*tasks, "h1", "h5"])
        assert (await http.get("/wanted")).json() == {"eval": {}, "next": {}}


def test_evaluations_that_the_sdk_opens_are_those_that_a_trainer_wants(daemon: ProxyProcess) -> None:
    """Of the model that they name, else of the only one that is trained; and no more than are wanted."""
    with Client() as client:
        client.ask("policy", Policy("stub", 1))
        name = client.ask("evaluate", Evaluate("stub", 2)).json()["evaluation"]
        opened = []
        for told in ({}, {"model": "stub"}, {}):
            with ajet_sdk.episode("held-out", eval=True, **told) as ep:
                ask(ep)
                ep.reward(0.5)
                opened.append(ep.record())
        assert [(one["state"], one.get("evaluation")) for one in opened] == [
            ("recorded", name), ("recorded", name), ("recorded", None),
        ]  # fmt: skip
        told = client.ask("evaluation", id=name).json()
        assert (told["opened"], told["done"], told["rewards"]) == (2, 2, [0.5, 0.5])
        assert client.ask("wanted").json() == {"eval": {}, "next": {}}


def test_a_log_is_scored_by_the_ids_of_its_answers(daemon: ProxyProcess, ajet: Ajet) -> None:
    url = f"{daemon.url}/v1/chat/completions"
    logged = [
        httpx.post(url, json=ASK | {"user": f"sample {number}"}, timeout=LONG_S, trust_env=False) for number in range(4)
    ]
    ids, episodes = [one.json()["id"] for one in logged], [one.headers["X-AJet-Episode"] for one in logged]
    ajet_sdk.reward(0.25, response=ids[0])
    asyncio.run(aio.reward(0.5, response=ids[1]))
    assert ajet("reward", "0.75", "--response", ids[2])[0] == 0
    with ajet_sdk.episode("log/4") as ep:
        ep.reward(1.0, response=ask(ep).json()["id"])
    assert ep.outcome == Outcome(reward=1.0)
    ajet_sdk.reward(0.125, response=ids[3], episode=episodes[3], final=False)
    code, out, err = ajet("show", episodes[2])
    assert code == 0 and ids[2] in out and "reward: 0.75" in out
    with Client() as client:
        records = [client.ask("get_episode", id=name).json() for name in episodes]
    assert [one["reward"] for one in records] == [0.25, 0.5, 0.75, 0.125]
    assert [one["state"] for one in records] == [*3 * ["ready"], "open"]
    code, out, err = ajet("reward", "1", "--response", "chatcmpl-nobody")
    assert code == 1 and "chatcmpl-nobody" in err


def test_a_note_stands_beside_the_reward_whichever_way_it_came(daemon: ProxyProcess, ajet: Ajet) -> None:
    def agent(task: str, episode: ajet_sdk.Episode) -> tuple[float, str]:
        ask(episode)
        return 0.5, "returned"

    (played,) = ajet_sdk.run(agent, ["note"], repeat=1)
    with ajet_sdk.episode("note") as command, ajet_sdk.episode("note") as header:
        assert ajet("reward", "1", "--note", "at the prompt", "--not-final", "--episode", command.id)[0] == 0
        said = {"X-AJet-Reward": "1", "X-AJet-Reward-Note": "in a header"}
        url = f"{daemon.url}/e/{header.id}/v1/models"
        httpx.get(url, headers=said, timeout=LONG_S, trust_env=False).raise_for_status()
        records = [command.record(), header.record()]
    with Client() as client:
        records.append(client.ask("get_episode", id=played.episode).json())
    assert [one["rewards"][0]["note"] for one in records] == ["at the prompt", "in a header", "returned"]
    assert "note returned" in ajet("show", str(played.episode))[1]


STATE = "import os; print(ajet_sdk.Client().ask('get_episode', id=os.environ['AJET_EPISODE']).json()"


@pytest.mark.parametrize("asked", [("--reward-cmd", "echo 0"), ("--reward-from", "exit-code"), ()], ids=" ".join)
def test_no_trainer_has_an_episode_before_the_reward_that_was_asked_for(
    daemon: ProxyProcess, ajet: Ajet, asked: tuple[str, ...]
) -> None:
    """Though its program gave itself another, and called it final."""
    script = f"{AGENT}\nimport ajet_sdk; ajet_sdk.reward(1)\n{STATE}['state'])\nraise SystemExit(3)"
    code, out, err = ajet("run", "--task", "graded", *asked, "--", sys.executable, "-c", script)
    assert code == 0, (out, err)
    assert out.splitlines()[1] == ("open" if asked else "ready")
    with Client() as client:
        record = client.ask("list_episodes").json()["episodes"][0]
    assert (record["state"], record["reward"]) == ("ready", 0.0 if asked else 1.0)


def test_no_note_costs_a_reward(daemon: ProxyProcess, ajet: Ajet) -> None:
    """A failed test says more than one that passed, in whatever encoding."""
    log = "E  assert \udce9 == 2\n" * 1000

    def agent(task: str, episode: ajet_sdk.Episode) -> tuple[float, str]:
        ask(episode)
        return 0.0, log

    (item,) = ajet_sdk.run(agent, ["once"], repeat=1)
    assert item.reward == 0.0
    with Client() as client:
        once = client.ask("get_episode", id=item.episode).json()["rewards"]
    assert once[0]["note"].startswith("E  assert ? == 2") and len(once[0]["note"]) == 10_000
    with ajet_sdk.episode("note") as command, ajet_sdk.episode("note") as given_up:
        assert ajet("reward", "0", "--note", log, "--episode", command.id) == (0, "", "")
        assert ajet("abort", "--reason", log, "--episode", given_up.id) == (0, "", "")
        assert command.record()["rewards"][0]["note"] == once[0]["note"]
        assert given_up.record()["detail"] == once[0]["note"]


def test_a_game_of_two_is_shown_by_agent(daemon: ProxyProcess, ajet: Ajet) -> None:
    def game(task: str, episode: ajet_sdk.Episode) -> None:
        ask(episode)
        won = {"won": 1.0, "lost": -0.5, "drawn": 0.0}[task]
        episode.reward(won, agent="white", final=False)
        episode.reward(-won, agent="black")

    results = ajet_sdk.run(game, ["won", "lost", "drawn", "drawn"], repeat=1, parallel=1)
    assert [item.reward for item in results] == [0.0] * 4
    assert results[0].agents == {"white": 1.0, "black": -1.0}
    assert results.mean_by_agent == {"white": 0.125, "black": -0.125}
    assert "0 (white 1, black -1)" in results.table() and "0 (white -0.5, black 0.5)" in results.table()
    assert results.summary().endswith("mean reward 0 (white 0.125, black -0.125)")
    assert "reward_by_agent: white 1, black -1" in ajet("show", str(results[0].episode))[1]
    rewards = "import ajet_sdk; ajet_sdk.reward(1, agent='white', final=False); ajet_sdk.reward(-1, agent='black')"
    code, out, err = ajet("run", "--task", "program", "--", sys.executable, "-c", f"{AGENT}\n{rewards}")
    assert (code, "0 (white 1, black -1)" in out) == (0, True), (out, err)
