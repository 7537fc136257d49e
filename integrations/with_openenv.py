"""An environment behind a server of OpenEnv, played over the server's own protocol, in as many places as it has.

    python integrations/with_openenv.py http://127.0.0.1:8000 4 64 message

The server has 4 places (its `max_concurrent_envs`), so 4 episodes are played at once, of 64 seeds. An answer is the
action's field `message`. The rewards are added. What the server fails is played again; a full one is waited for.
"""

import asyncio
import json
import sys
from importlib.metadata import version

if (here := version("openenv")) != (tried := "0.10.0"):
    print(f"openenv {here} is installed; this recipe was run with {tried}", file=sys.stderr)

from openai import AsyncOpenAI
from openenv import GenericEnvClient
from websockets.exceptions import WebSocketException

from ajet_sdk import Busy, aio

server, places, seeds, field = sys.argv[1:]


async def agent(task: str, episode: aio.Episode) -> float:
    model, messages, earned = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key), [], 0.0
    async with GenericEnvClient(base_url=server) as world:
        try:
            result = await world.reset(seed=int(task.rsplit("/", 1)[1]))
        except RuntimeError as refused:
            raise (Busy if "CAPACITY_REACHED" in str(refused) else OSError)(str(refused)) from refused
        while not result.done:
            messages.append({"role": "user", "content": json.dumps(result.observation)})
            answer = await model.chat.completions.create(model="policy", messages=messages, max_tokens=256)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            result = await world.step({field: messages[-1]["content"]})
            earned += result.reward or 0.0
    return earned


tasks, failures = [f"openenv/{seed}" for seed in range(int(seeds))], (OSError, RuntimeError, WebSocketException)
print(asyncio.run(aio.run(agent, tasks, parallel=int(places), infra=failures, play=" ".join(sys.argv[1:]))).table())
