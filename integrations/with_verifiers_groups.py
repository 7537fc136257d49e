"""An environment of the API of verifiers before 0.4, whose rubric may score the rollouts of a group together.

    python integrations/with_verifiers_groups.py my-env 8

The rollouts of a group are played at once, each at the address of its own episode. Then the rubric scores them, and
each episode gets its reward, with the metrics as note. Groups are played whole: nothing goes on after a kill.
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


async def main() -> None:
    for row in env.get_dataset():
        openings = [aio.episode(f"{sys.argv[1]}/{row['example_id']}") for _ in range(size)]
        async with contextlib.AsyncExitStack() as stack:
            episodes = [await stack.enter_async_context(one) for one in openings]
            told = [vf.ClientConfig(api_base_url=one.base_url, api_key_var="AJET_API_KEY") for one in episodes]
            states = await asyncio.gather(*(env.rollout(row, resolve_client(one), "policy") for one in told))
            await env.rubric.score_group(states)
            for episode, state in zip(episodes, states, strict=True):
                await episode.reward(state["reward"], note=json.dumps(state["metrics"]))


asyncio.run(main())
