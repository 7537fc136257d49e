"""A game of TextArena for two, in which each seat is an agent: one model plays both, or two models learn.

    python integrations/with_textarena.py KuhnPoker-v0-raw 64 [player-0=MODEL player-1=MODEL]

64 seeds are played. Each seat has its own reward. A `-raw` game tells only what is new, so that turns are one timeline.
"""

import asyncio
import sys
from importlib.metadata import version

if (here := version("textarena")) != (tried := "0.7.4"):
    print(f"textarena {here} is installed; this recipe was run with {tried}", file=sys.stderr)

import textarena
from openai import AsyncOpenAI

from ajet_sdk import aio

members = dict(word.split("=", 1) for word in sys.argv[3:])


async def agents(task: str, episode: aio.Episode) -> None:
    model, told, over = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key), ([], []), False
    game = textarena.make(sys.argv[1])
    game.reset(num_players=2, seed=int(task.rsplit("/", 1)[1]))
    while not over:
        seat, news = game.get_observation()
        told[seat].append({"role": "user", "content": "\n".join(text for _, text, _ in news)})
        answer = await model.chat.completions.create(
            model="policy", messages=told[seat], max_tokens=256, extra_headers={"X-AJet-Agent": f"player-{seat}"}
        )
        told[seat].append({"role": "assistant", "content": answer.choices[0].message.content})
        over, _ = game.step(told[seat][-1]["content"])
    for seat, reward in game.close()[0].items():
        await episode.reward(reward, agent=f"player-{seat}", final=False)


tasks = [f"{sys.argv[1]}/{seed}" for seed in range(int(sys.argv[2]))]
print(asyncio.run(aio.run(agents, tasks, members=members, play=" ".join(sys.argv[1:]))).table())
