"""Environments and benchmarks of others, unmodified: their own code asks, plays and judges, and the episode has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integrations.stage import FOLDER, LOCKS, Stage, python_of
from tests.kit.engine_script import Rule
from tests.kit.environment import clean
from tests.kit.patience import until
from tests.kit.ports import free_port
from tests.kit.rig import Rig

pytestmark = [pytest.mark.integrations, pytest.mark.slow]

PACKAGES = {
    "with_gymnasium.py": ("gymnasium", "gymnasium"),
    "with_harbor.py": ("harbor", "harbor"),
    "with_inspect.py": ("inspect-ai", "inspect-ai"),
    "with_openenv.py": ("openenv", "openenv"),
    "with_reasoning_gym.py": ("reasoning-gym", "reasoning-gym"),
    "with_textarena.py": ("textarena", "textarena"),
    "with_verifiers.py": ("verifiers", "verifiers"),
    "with_verifiers_groups.py": ("verifiers-groups", "verifiers"),
    "with_vf_eval.py": ("verifiers", "verifiers"),
}  # fmt: skip
"""The recipes, with the environment that each runs in and the package that it was run with."""


@pytest.mark.parametrize("recipe", PACKAGES)
def test_another_version_is_said_in_a_line(tmp_path: Path, recipe: str) -> None:
    """A recipe names the locked version, and says so before a package of another version may break it."""
    environment, package = PACKAGES[recipe]
    [locked] = re.findall(rf"^{package}==(\S+)$", (LOCKS / f"{environment}.lock").read_text(), re.MULTILINE)
    (other := tmp_path / f"{package.replace('-', '_')}-9.9.dist-info").mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    (tmp_path / f"{package.replace('-', '_')}.py").write_text("raise ImportError('of another version')\n")
    program = (python_of(environment), str(FOLDER / recipe))
    done = subprocess.run(program, env=clean(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[0] == f"{package} 9.9 is installed; this recipe was run with {locked}"


def test_reasoning_gym(theatre: Stage) -> None:
    """Its scorer gives the reward, and its examples stand before the question. The same command has nothing to do."""
    theatre.script((Rule("words: hundred, go", "go, hundred"), Rule("Reverse", "no idea")))
    task, options = "word_sequence_reversal", ("size=2", "examples=2", "repeat=2", "min_words=2", "max_words=2")
    program = (python_of("reasoning-gym"), str(FOLDER / "with_reasoning_gym.py"), task, *options)
    assert "4 episodes: 4 rewarded, mean reward 0.5" in theatre.run(*program)
    for number, reward in ((0, 1.0), (1, 0.0)):
        episodes = theatre.episodes(f"{task}/{number}")
        assert [(one["state"], one["reward"], len(one["calls"])) for one in episodes] == [("ready", reward, 1)] * 2


SUMS = (Rule("17 + 25", "It is 42."), Rule("3 + 4", "No idea."))
TASKSETS = str(Path(__file__).parent / "environments")
"""Small environments, as users write them, for those packages that bring none which plays without a network."""


def check_sums(theatre: Stage, newest: int, named_by: str) -> None:
    """The episodes of two rollouts of each sum: each is whole, with its score as reward and its metrics as note."""
    episodes = [theatre.record(one["episode"]) for one in theatre.listed()[:newest]]
    told = [(one["state"], one["reward"], [each["note"] for each in one["rewards"]]) for one in episodes]
    assert sorted(told) == [*[("ready", 0.0, ['{"words": 2.0}'])] * 2, *[("ready", 1.0, ['{"words": 3.0}'])] * 2]
    for one in episodes:
        assert [(call["complete"], call["identified_by"]) for call in one["calls"]] == [(True, named_by)]
    assert len({one["task"] for one in episodes}) == 2


def test_verifiers(theatre: Stage) -> None:
    theatre.script(SUMS)
    local = {"taskset": {"id": "sum_v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    program = (python_of("verifiers"), str(FOLDER / "with_verifiers.py"), json.dumps(local))
    out = theatre.run(*program, env=programs_of("verifiers"))
    assert "4 episodes: 4 rewarded, mean reward 0.5" in out
    check_sums(theatre, 4, "path")


def test_vf_eval(theatre: Stage) -> None:
    theatre.script(SUMS)
    local = ("--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess")
    program = (python_of("verifiers"), str(FOLDER / "with_vf_eval.py"), "sum_v1", "-n", "2", "-r", "2", *local)
    theatre.run(*program, env=programs_of("verifiers"))
    check_sums(theatre, 4, "harness")


def test_verifiers_whose_groups_are_scored_together(theatre: Stage) -> None:
    theatre.script(SUMS)
    program = (python_of("verifiers-groups"), str(FOLDER / "with_verifiers_groups.py"), "longest", "3")
    theatre.run(*program, env=programs_of("verifiers-groups"))
    episodes = theatre.episodes("longest/0")
    assert [(one["state"], one["reward"], len(one["calls"])) for one in episodes] == [("ready", 1.0, 1)] * 3
    assert {each["note"] for one in episodes for each in one["rewards"]} == {'{"longest": 1.0, "num_turns": 1.0}'}


def test_inspect(theatre: Stage, tmp_path: Path) -> None:
    """Each sample of each epoch is an evaluation of its own, which its own calls name. Those that a trainer wants of
    the model are counted for it."""
    theatre.script(SUMS)
    with Rig(theatre.proxy) as rig:
        wanted = rig.post("/evaluations", {"model": "policy", "episodes": 3}).json()["evaluation"]
    told = ("--model", "openai-api/ajet/policy", "--epochs", "2", "--display", "plain", "--log-dir", str(tmp_path))
    env = {"AJET_BASE_URL": f"{theatre.proxy}/v1", "AJET_API_KEY": "none", "HOME": str(tmp_path)}
    program = (python_of("inspect-ai"), str(FOLDER / "with_inspect.py"), "eval", "sums.py", *told)
    assert re.search(r"accuracy +0\.5", theatre.run(*program, env=env, cwd=Path(TASKSETS)))
    for name, reward, note in (("17+25", 1.0, "C"), ("3+4", 0.0, "I")):
        episodes = theatre.episodes(f"sums.py/{name}")
        assert [(one["state"], one["reward"], one["eval"]) for one in episodes] == [("recorded", reward, True)] * 2
        assert [each["note"] for one in episodes for each in one["rewards"]] == [note] * 2
        assert [call["identified_by"] for one in episodes for call in one["calls"]] == ["header"] * 2
    with Rig(theatre.proxy) as rig:
        told = rig.get(f"/evaluations/{wanted}").json()
        assert (told["opened"], told["done"], told["lost"]) == (3, 3, 0)
        assert sum(one.get("evaluation") == wanted for one in theatre.listed()) == 3 and len(told["rewards"]) == 3


@pytest.mark.parametrize("models", [("policy", "policy"), ("first-seat", "second-seat")], ids=["one", "two"])
def test_textarena(theatre: Stage, models: tuple[str, str]) -> None:
    """Each seat is an agent with a reward and a timeline of its own, as one model or as two."""
    theatre.script((Rule("bet", "[bet]"),))
    members = [f"player-{seat}={model}" for seat, model in enumerate(models)] if models[0] != models[1] else []
    program = (python_of("textarena"), str(FOLDER / "with_textarena.py"), "KuhnPoker-v0-raw", "1", *members)
    assert "8 episodes: 8 rewarded" in theatre.run(*program)
    for one in theatre.episodes("KuhnPoker-v0-raw/0")[:8]:
        rewards = {each["agent"]: each["value"] for each in one["rewards"]}
        assert one["state"] == "ready" and sorted(rewards.values()) == [-1.0, 1.0]
        asked = {(call["agent"], call["model"]) for call in one["calls"]}
        assert asked == {("player-0", models[0]), ("player-1", models[1])}
        assert [line.get("broken_by") for line in one["timelines"]] == [None, None]


def test_gymnasium(theatre: Stage) -> None:
    """Six steps over the ice to the goal: as many turns of one timeline, with the environment's reward."""
    way = {0: 2, 1: 2, 2: 1, 6: 1, 10: 1, 14: 2}
    theatre.script([Rule(f"State: {state}", f"Action {action}") for state, action in sorted(way.items(), reverse=True)])
    options = ("FrozenLake-v1", "1", '{"is_slippery": false}')
    program = (python_of("gymnasium"), str(FOLDER / "with_gymnasium.py"), *options)
    assert "8 episodes: 8 rewarded, mean reward 1" in theatre.run(*program)
    for one in theatre.episodes("FrozenLake-v1/0"):
        assert (one["state"], one["reward"], len(one["calls"])) == ("ready", 1.0, 6)
        assert [line.get("broken_by") for line in one["timelines"]] == [None]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


HOLDS = """
import asyncio, sys
from openenv import GenericEnvClient

async def hold():
    async with GenericEnvClient(base_url=sys.argv[1]) as one, GenericEnvClient(base_url=sys.argv[1]) as other:
        await one.reset(), await other.reset()
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(hold())
"""
"""Others who have both places of the server, until nobody needs them."""


def test_openenv(theatre: Stage) -> None:
    """A server with two places has two players. What it refuses while others have its places uses up no attempt: all
    are played in the end."""
    theatre.script((Rule("door 0", "It is 0."), Rule("door 1", "No idea."), Rule("Try again", "I give up.")))
    url, server = f"http://127.0.0.1:{(port := free_port())}", ("-m", "uvicorn", "doors:app", "--port", str(port))
    program = (python_of("openenv"), str(FOLDER / "with_openenv.py"), url)
    with subprocess.Popen((python_of("openenv"), *server), cwd=TASKSETS, env=clean()) as serving:
        try:
            assert until(lambda: answers(url))
            assert re.search("16 rewarded.* mean reward 0.5", theatre.run(*program, "2", "2", "message"))
            assert "8 rewarded" in play_where_all_is_taken(theatre, url, (*program, "8", "1", "message"))
        finally:
            serving.terminate()
    for number, played, reward, calls in ((0, 16, 1.0, 1), (1, 8, 0.0, 2)):
        kept = [one for one in theatre.episodes(f"openenv/{number}") if one["state"] != "discarded"]
        assert len(kept) == played
        for one in kept:
            assert (one["state"], one["reward"], len(one["calls"])) == ("ready", reward, calls)
            assert [line.get("broken_by") for line in one["timelines"]] == [None]


def play_where_all_is_taken(theatre: Stage, url: str, program: Sequence[str]) -> str:
    """The output of `program`, which was refused by the server at `url`, until it had free places."""
    others = (python_of("openenv"), "-c", HOLDS, url)
    with (
        subprocess.Popen(others, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean()) as holding,
        ThreadPoolExecutor() as pool,
    ):
        assert holding.stdin is not None and holding.stdout is not None
        assert holding.stdout.readline() == b"held\n"
        playing = pool.submit(theatre.run, *program)
        assert until(lambda: any("sessions active" in (one.get("detail") or "") for one in theatre.listed()))
        holding.stdin.close()
        return playing.result()


def test_harbor_without_a_container(theatre: Stage, tmp_path: Path) -> None:
    """Terminus 2 works in a terminal, and the task's own test judges; only the box is a plain folder."""
    keys = [{"keystrokes": "echo hello > greeting.txt\n", "duration": 2.0}]
    answer = json.dumps({"analysis": "none", "plan": "write", "commands": keys, "task_complete": True})
    theatre.script((Rule("hello into greeting.txt", answer),))
    program = (python_of("harbor"), str(FOLDER / "with_harbor.py"), f"{TASKSETS}/boxed", "bare_box:Box", "2")
    env = programs_of("harbor") | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)}
    out = theatre.run(*program, env=env, cwd=tmp_path)
    assert "8 episodes: 8 rewarded, mean reward 1" in out
    for one in theatre.episodes("harbor/hello"):
        assert (one["state"], one["reward"], one["rewards"][0]["note"]) == ("ready", 1.0, "{'reward': 1.0}")
        assert [line.get("broken_by") for line in one["timelines"]] == [None]


def programs_of(environment: str) -> dict[str, str]:
    """Finds the programs of an environment, uv among them, and the small environments above."""
    folder = Path(python_of(environment)).parent
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": TASKSETS}
