"""An environment of Gymnasium with discrete states and actions: the model says the number of its action, turn by turn.

    python integrations/with_gymnasium.py FrozenLake-v1 64 '{"is_slippery": false}'

64 seeds are played. Each is one conversation, so its turns are one timeline. An answer without an action ends it.
"""

import json
import re
import sys
from importlib.metadata import version

if (here := version("gymnasium")) != (tried := "1.4.0"):
    print(f"gymnasium {here} is installed; this recipe was run with {tried}", file=sys.stderr)

import gymnasium
from openai import OpenAI

import ajet_sdk


def agent(task: str, episode: ajet_sdk.Episode) -> float:
    client, earned, over = OpenAI(base_url=episode.base_url, api_key=episode.api_key), 0.0, False
    world = gymnasium.make(sys.argv[1], **json.loads(sys.argv[3]))
    seen, _ = world.reset(seed=int(task.rsplit("/", 1)[1]))
    messages = [{"role": "system", "content": f"Say the number of an action, below {world.action_space.n}."}]
    while not over:
        messages.append({"role": "user", "content": f"State: {seen}"})
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=64).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
        said = re.findall(r"\d+", answer.content or "")
        if not said or not world.action_space.contains(int(said[-1])):
            break
        seen, reward, ended, cut, _ = world.step(int(said[-1]))
        earned, over = earned + float(reward), ended or cut
    return earned


tasks = [f"{sys.argv[1]}/{seed}" for seed in range(int(sys.argv[2]))]
print(ajet_sdk.run(agent, tasks, play=" ".join(sys.argv[1:])).table())
