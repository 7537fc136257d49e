"""An environment of verifiers 1.x, played in this process by its own rollout, and scored by its own rewards.

    python integrations/with_verifiers.py '{"taskset": {"id": "sums-v1"}, "agent": {"runtime": {"type": "docker"}}}'

The word is what `vf-eval` takes as `--env`. A harness needs `uv` on the path. The metrics become the reward's note.
"""

import asyncio
import json
import sys
from importlib.metadata import version

if (here := version("verifiers")) != (tried := "0.4.0"):
    print(f"verifiers {here} is installed; this recipe was run with {tried}", file=sys.stderr)

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from ajet_sdk import aio

env = load_environment(resolve_env_config(json.loads(sys.argv[1])))
tasks = {f"{env.config.env_id}/{task.data.name or task.data.idx}": task for task in env.taskset.take(64)}


async def agent(name: str, episode: aio.Episode) -> None:
    client = vf.EvalClientConfig(base_url=episode.base_url, api_key_var="AJET_API_KEY")
    played = await env.run_episode(tasks[name], vf.ModelContext("policy", client))
    if not played.ok:
        raise RuntimeError([error.message for one in (played, *played.traces) for error in one.errors])
    await episode.reward(played.traces[-1].reward, note=json.dumps(played.traces[-1].metrics))


async def main() -> None:
    async with env.serving():
        results = await aio.run(agent, list(tasks), repeat=2, play=sys.argv[1])
    print(results.table())
    sys.exit(1 if results.failures else 0)


asyncio.run(main())
