"""A folder of Harbor's tasks, as those of Terminal-Bench 2, played by its Terminus 2 and judged by their own tests.

    python integrations/with_harbor.py TASKS docker 8

Each trial has a box of its own (docker, or another of Harbor's), 8 at once. A trial without a reward is played again.
"""

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path

if (here := version("harbor")) != (tried := "0.26.0"):
    print(f"harbor {here} is installed; this recipe was run with {tried}", file=sys.stderr)

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

import ajet_sdk

folder, box = Path(sys.argv[1]), {"import_path" if ":" in sys.argv[2] else "type": sys.argv[2]}


async def trial(task: str, episode: ajet_sdk.Episode) -> dict[str, float]:
    model = {"api_base": episode.base_url, "llm_kwargs": {"api_key": episode.api_key}, "record_terminal_session": False}
    agent = AgentConfig(name="terminus-2", model_name="openai/policy", kwargs=model)
    config = TrialConfig(task=TaskConfig(path=folder / task), agent=agent, environment=EnvironmentConfig(**box))
    result = await (await Trial.create(config)).run()
    if result.verifier_result is None or not result.verifier_result.rewards:
        raise OSError(f"no reward: {result.exception_info}")
    return result.verifier_result.rewards


def agent(task: str, episode: ajet_sdk.Episode) -> None:
    rewards = asyncio.run(trial(task.removeprefix("harbor/"), episode))
    episode.reward(rewards.get("reward", sum(rewards.values())), note=str(rewards))


tasks = [f"harbor/{path.parent.name}" for path in sorted(folder.glob("*/task.toml"))]
print(ajet_sdk.run(agent, tasks, parallel=int(sys.argv[3]), infra=(OSError,), play=" ".join(sys.argv[1:])).table())
