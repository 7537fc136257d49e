"""Plays items of a task of reasoning-gym, and evaluations on others, until it is ended (see `puzzles`).

    python -m tests.bench.puzzle_player TASK SEED ITEMS REPEAT HELD_OUT [FILE]

With FILE it plays no evaluations: the items held out for them are written there, for `puzzle_benchmark`.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from openai import OpenAI
from reasoning_gym import create_dataset

import ajet_sdk

LIMITS = {
    "word_sequence_reversal": {"min_words": 2, "max_words": 2},
    "number_sorting": {
        "min_numbers": 2, "max_numbers": 2, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 100,
    },
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
}
SHOTS, EXAMPLES, ELSEWHERE = 4, 4242, 777_000


def main(task: str, seed: int, items: int, repeat: int, held_out: int, file: str) -> None:
    made = partial(create_dataset, task, **LIMITS[task])
    examples: list[Any] = [
        {"role": role, "content": item[part]}
        for item in made(size=SHOTS, seed=EXAMPLES)
        for role, part in (("user", "question"), ("assistant", "answer"))
    ]

    def play(data: Any, place: str, episode: ajet_sdk.Episode) -> float:
        item = data[int(place.rpartition("/")[2])]
        client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        asked = [*examples, {"role": "user", "content": item["question"]}]
        answer = client.chat.completions.create(model="policy", messages=asked, temperature=1.0, max_tokens=32)
        return float(data.score_answer((answer.choices[0].message.content or "").strip(), item))

    def begin(data: Any, name: str, **how: Any) -> threading.Thread:
        tasks = [f"{name}/{place}" for place in range(len(data))]
        thread = threading.Thread(target=ajet_sdk.run, args=(partial(play, data), tasks), kwargs=how)
        thread.start()
        return thread

    others = made(size=held_out, seed=ELSEWHERE + seed)
    if file:
        asked = [{"question": item["question"], "answer": item["answer"]} for item in others]
        Path(file).write_text(json.dumps({"examples": examples, "items": asked}))
    else:
        begin(others, f"{task}-held-out", eval=True, wanted=True, parallel=16)
    begin(made(size=items, seed=seed), task, repeat=repeat, parallel=repeat * 4).join()


if __name__ == "__main__":
    seed, items, repeat, held_out = map(int, sys.argv[2:6])
    main(sys.argv[1], seed, items, repeat, held_out, "".join(sys.argv[6:]))
