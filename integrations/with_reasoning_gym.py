"""Any task of reasoning-gym as a data set: its questions, its own scorer, and some of its examples as turns before.

    python integrations/with_reasoning_gym.py word_sequence_reversal size=64 examples=4 min_words=2 max_words=2

Importing it takes seconds, so one process plays all episodes. The same command goes on where it was left. Other words
than `size`, `seed`, `examples` and `repeat` configure the task.
"""

import json
import sys
from importlib.metadata import version

if (here := version("reasoning-gym")) != (tried := "0.1.25"):
    print(f"reasoning-gym {here} is installed; this recipe was run with {tried}", file=sys.stderr)

import reasoning_gym
from openai import OpenAI

import ajet_sdk

told = {"size": 64, "seed": 1, "examples": 4, "repeat": 8}
told |= {key: json.loads(value) for key, value in (word.split("=", 1) for word in sys.argv[2:])}
examples, repeat, tasks = told.pop("examples"), told.pop("repeat"), range(told["size"])
data = reasoning_gym.create_dataset(sys.argv[1], **told)
shots = reasoning_gym.create_dataset(sys.argv[1], **(told | {"size": max(examples, 1), "seed": 4242}))
before = [text for number in range(examples) for text in (shots[number]["question"], shots[number]["answer"])]


def agent(task: str, episode: ajet_sdk.Episode) -> float:
    entry = data[int(task.rsplit("/", 1)[1])]
    turns = zip(("user", "assistant") * examples + ("user",), [*before, entry["question"]], strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
    return data.score_answer((answer.choices[0].message.content or "").strip(), entry)


results = ajet_sdk.run(agent, [f"{sys.argv[1]}/{one}" for one in tasks], repeat=repeat, play=" ".join(sys.argv[1:]))
print(results.table())
sys.exit(1 if results.failures else 0)
