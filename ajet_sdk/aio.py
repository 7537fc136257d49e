"""The SDK for asyncio: what `ajet_sdk` has, for ``await``.

::

    await aio.reward(1.0)
    async with aio.episode(task="gsm8k/17") as ep:
        AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
        await ep.reward(1.0)
    results = await aio.run(agent, tasks)       # async agent(task, episode) -> reward

Cancelling is what KeyboardInterrupt is to the blocking face: open episodes are aborted on the way out.
"""

from __future__ import annotations

from ajet_sdk.client import Client
from ajet_sdk.play.episode import Episode, abort, episode, reward
from ajet_sdk.play.membership import Membership, join
from ajet_sdk.play.rollouts import run

__all__ = ["Client", "Episode", "Membership", "abort", "episode", "join", "reward", "run"]
