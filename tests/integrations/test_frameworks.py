"""Each framework plays its recipe for real: asks, calls its tool, answers; and leaves the episode that the table says.

The stories are two: a product that the model works out with the tool (reward 1), and one where it gives up (reward 0).
The engine reads some words of a history as other tokens than it samples, so that a conversation stays one timeline only
where its history is sent as the exact ids.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.frame import decode_batch
from tests.integrations.stage import AJET, ENVIRONMENTS, FOLDER, Stage, python_of
from tests.kit.engine_script import Rule
from tests.kit.rig import Rig

EXACT = ("first_turn", "exact")
"""The continuity of two calls where an agent keeps to its history."""
UNKNOWN = ("first_turn", "unknown_history")
LEFT_OUT = ("first_turn", "words_left_out")

pytestmark = [pytest.mark.integrations, pytest.mark.slow]

STORY = (
    Rule("425", tool="final_answer", arguments={"answer": "425"}),  # smolagents ends by a tool
    Rule("425", tool="final_result", arguments={"response": 425}),  # so does Pydantic AI for a typed result
    Rule("425", "17 times 25 is 425."),
    Rule("17 * 25", "The number: ", tool="multiply", arguments={"a": 17, "b": 25}),
    Rule("3 * 4", tool="final_answer", arguments={"answer": "I give up."}),
    Rule("3 * 4", tool="final_result", arguments={"response": 0}),
    Rule("3 * 4", "I give up."),
)


@dataclass(frozen=True, slots=True)
class Framework:
    """`broken_by` is what splits the second call from the first; None where the round trip makes one timeline.
    `continuity` is what its two calls say."""

    environment: str
    recipe: str
    continuity: tuple[str | None, ...] = EXACT
    broken_by: str | None = None
    options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


FRAMEWORKS = (
    Framework("langchain", "with_langchain.py"),
    Framework("openai-agents", "with_openai_agents.py"),
    Framework("pydantic-ai", "with_pydantic_ai.py", options=("--reward-from", "stdout")),
    Framework("smolagents", "with_smolagents.py", UNKNOWN, "history_edited"),  # it retells tool calls as text
    Framework("autogen", "with_autogen.py"),
    Framework("agentscope", "with_agentscope.py"),
    Framework("llama-index", "with_llama_index.py"),
    # CrewAI leaves out what is said beside a tool call
    Framework("crewai", "with_crewai.py", LEFT_OUT, "history_edited", env=(("OTEL_SDK_DISABLED", "true"),)),
)
TEAMS = {"with_autogen_team.py": "autogen", "with_agentscope_team.py": "agentscope"}
"""Recipes of two agents, with the environments that they run in."""


@pytest.mark.parametrize(
    ("a", "b", "calls", "reward"), [("17", "25", 2, 1.0), ("3", "4", 1, 0.0)], ids=["solved", "given-up"]
)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.environment)
def test_framework(theatre: Stage, framework: Framework, a: str, b: str, calls: int, reward: float) -> None:
    theatre.script(STORY)
    task = f"{framework.recipe}/{a}x{b}"
    program = (python_of(framework.environment), str(FOLDER / framework.recipe), a, b)
    told = ("run", "--task", task, "--repeat", "2", "--parallel", "2", *framework.options)
    theatre.run(*AJET, *told, "--", *program, env=dict(framework.env))
    episodes = theatre.episodes(task)
    assert len(episodes) == 2
    for episode in episodes:
        check(episode, reward, framework.continuity[:calls], framework.broken_by)


def check(
    episode: dict[str, Any], reward: float, continuity: tuple[str | None, ...], broken_by: str | None = None
) -> None:
    """One episode, found by its own key in the base URL, whole and rewarded."""
    assert (episode["state"], episode["reward"]) == ("ready", reward)
    check_calls(episode, "path", continuity, broken_by)


def check_calls(
    episode: dict[str, Any], named_by: str, continuity: tuple[str | None, ...], broken_by: str | None
) -> None:
    """Merged as far as its agent lets it be: a second call, if there is one, is split off by `broken_by`.
    `continuity` is what the calls say, one by one."""
    told = [(call["complete"], call["identified_by"], call.get("continuity")) for call in episode["calls"]]
    assert told == [(True, named_by, word) for word in continuity]
    split = [broken_by] if broken_by and len(continuity) > 1 else []
    assert [line.get("broken_by") for line in episode["timelines"]] == [None, *split]
    sampled = sum(len(call["token_ids"]) for call in episode["calls"])
    assert sum(sum(line["loss_mask"]) for line in episode["timelines"]) == sampled


MODELS = {"solver": "first-model", "critic": "second-model"}


def check_team(theatre: Stage, solved: Mapping[str, bool], *, rewards: int) -> None:
    """Each task has two episodes, with so many `rewards`, in which each agent asked its own model. Two trainers lease
    each its share of them."""
    episodes = {episode["episode"]: episode for task in solved for episode in theatre.episodes(task)}
    assert len(episodes) == 2 * len(solved)
    for episode in episodes.values():
        right = solved[episode["task"]]
        assert (episode["state"], episode["reward"], episode["members"]) == ("ready", rewards * right, MODELS)
        told = [(call["agent"], call["model"], call["complete"]) for call in episode["calls"]]
        asked = ["solver", "solver", "critic"] if right else ["solver", "critic"]
        assert told == [(agent, MODELS[agent], True) for agent in asked]
    with Rig(theatre.proxy) as rig:
        for agent, model in MODELS.items():
            body = {"model": model, "group_size": 2, "groups": len(solved)}
            batch = decode_batch(rig.post("/batches/lease", body).content)
            leased = [one for group in batch.groups for one in group.episodes]
            assert {one.episode for one in leased} == set(episodes)
            for one in leased:
                assert {(sample.agent, sample.reward) for sample in one.samples} == {(agent, float(solved[one.task]))}
                calls = sum(len(sample.calls) for sample in one.samples)
                assert calls == (2 if agent == "solver" and solved[one.task] else 1)
            assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": 1}).is_success
    assert {theatre.record(episode)["state"] for episode in episodes} == {"trained"}


@pytest.mark.parametrize(("a", "b", "solved"), [("17", "25", True), ("3", "4", False)], ids=["solved", "given-up"])
@pytest.mark.parametrize("recipe", TEAMS)
def test_two_agents_on_two_models(theatre: Stage, recipe: str, a: str, b: str, solved: bool) -> None:
    theatre.script(STORY)
    task = f"{recipe}/{a}x{b}"
    program = (python_of(TEAMS[recipe]), str(FOLDER / recipe), a, b)
    team = [word for agent, model in MODELS.items() for word in ("--agent-model", f"{agent}={model}")]
    theatre.run(*AJET, "run", "--task", task, "--repeat", "2", "--parallel", "2", *team, "--", *program)
    check_team(theatre, {task: solved}, rewards=1)


def test_langgraph_team(theatre: Stage) -> None:
    """Each agent has a reward of its own. The zeros tell the tasks from those of the other recipe."""
    theatre.script(STORY)
    team = [f"{agent}={model}" for agent, model in MODELS.items()]
    out = theatre.run(python_of("langchain"), str(FOLDER / "with_langgraph_team.py"), *team, "17x025", "3x04")
    assert "4 episodes: 4 rewarded" in out
    check_team(theatre, {"17x025": True, "3x04": False}, rewards=2)


@pytest.mark.parametrize(("a", "b", "calls", "reward"), [("17", "25", 2, 1.0), ("3", "4", 1, 0.0)])
def test_openai_node(theatre: Stage, a: str, b: str, calls: int, reward: float) -> None:
    """Node.js looks for packages beside the program: the recipe is put where npm put them."""
    theatre.script(STORY)
    node, task = Path(python_of("node")).parent / "node", f"node/{a}x{b}"
    program = shutil.copy(FOLDER / "with_openai_node.mjs", ENVIRONMENTS / "node")
    theatre.run(*AJET, "run", "--task", task, "--", str(node), program, a, b)
    [episode] = theatre.episodes(task)
    check(episode, reward, EXACT[:calls])


def test_langgraph(theatre: Stage) -> None:
    """Four episodes in one process: the SDK opens, names and rewards them."""
    theatre.script(STORY)
    out = theatre.run(python_of("langchain"), str(FOLDER / "with_langgraph.py"), "17x25", "3x4")
    assert "4 episodes: 4 rewarded, mean reward 0.5" in out
    for task, calls, reward in (("17x25", 2, 1.0), ("3x4", 1, 0.0)):
        episodes = theatre.episodes(task)
        assert len(episodes) == 2
        for episode in episodes:
            check(episode, reward, EXACT[:calls])


@pytest.mark.parametrize(("a", "b", "reward"), [("17", "25", 1.0), ("3", "4", 0.0)], ids=["solved", "given-up"])
def test_metagpt(theatre: Stage, tmp_path: Path, a: str, b: str, reward: float) -> None:
    """Its tool is a notebook: the model writes code, and is then asked anew, in one message, whether it is done."""
    over = '```json\n{"thoughts": "The number is there.", "state": false}\n```'
    multiplies, gives_up = "```python\nprint(17 * 25)\n```", "```python\nprint('gave', 'up')\n```"
    theatre.script((Rule("425", over), Rule("gave up", over), Rule("17 * 25", multiplies), Rule("3 * 4", gives_up)))
    task = f"with_metagpt.py/{a}x{b}"
    program = (python_of("metagpt"), str(FOLDER / "with_metagpt.py"), a, b)
    theatre.run(*AJET, "run", "--task", task, "--", *program, env={"HOME": str(tmp_path)})
    [episode] = theatre.episodes(task)
    check(episode, reward, ("first_turn", "first_turn"), "new_chain")
