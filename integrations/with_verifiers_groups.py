"""An environment of the API of verifiers before 0.4, whose rubric may score the rollouts of a group together.

    python integrations/with_verifiers_groups.py my-env 8

The rollouts of a group are played at once, each at the address of an episode of its own. Then the rubric scores them all,
and each episode gets its reward, with the metrics as note. So groups are played whole, and none goes on after a kill.
"""

import asyncio
import contextlib
import json
import sys
from importlib.metadata import version

if (here := version("verifiers")) != (tried := "0.3.1"):
    print(f"verifiers {here} is installed; this recipe was run with {tried}", file=sys.stderr)

import verifiers as vf
from verifiers.clients import resolve_client

from ajet_sdk import aio

env, size = vf.load_environment(sys.argv[1]), int(sys.argv[2])


async def group(row: dict) -> None:
    async with contextlib.AsyncExitStack() as stack:
        name = f"{sys.argv[1]}/{row['example_id']}"
        episodes = [await stack.enter_async_context(aio.episode(task=name)) for _ in range(size)]
        told = [vf.ClientConfig(api_base_url=one.base_url, api_key_var="AJET_API_KEY") for one in episodes]
        states = await asyncio.gather(*(env.rollout(row, resolve_client(one), "policy") for one in told))
        await env.rubric.score_group(states)
        for episode, state in zip(episodes, states, strict=True):
            await episode.reward(state["reward"], note=json.dumps(state["metrics"]))


async def main() -> None:
    for row in env.get_dataset():
        await group(row)


asyncio.run(main())
