"""An environment behind a server of OpenEnv, played over the server's own protocol, in as many places as it has.

    python integrations/with_openenv.py http://127.0.0.1:8000 4 64 message

The server has 4 places, so 4 of 64 seeds play at once. An answer is the action's `message`. A full one is awaited.
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
            earned += (result := await world.step({field: messages[-1]["content"]})).reward or 0.0
    return earned


server, places, seeds, field = sys.argv[1:]
tasks, failures = [f"openenv/{seed}" for seed in range(int(seeds))], (OSError, RuntimeError, WebSocketException)
print(asyncio.run(aio.run(agent, tasks, parallel=int(places), infra=failures, play=" ".join(sys.argv[1:]))).table())
