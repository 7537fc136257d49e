"""An agent that knows nothing of ajet: three turns, and a score from 0 to 1 as the last line of its output.

What is right depends on the kind of the task: tokens from the lower half of the vocabulary, or those with even ids.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

HALF, TURNS, TOKENS = 275, 3, 24
UNSHAPED = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0
}


def right(lane: str, token: int) -> bool:
    return token < HALF if lane == "low" else token % 2 == 0


def ask(messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {
        "model": "tiny", "messages": messages, "max_tokens": TOKENS, "temperature": 1.0, "return_token_ids": True,
        **UNSHAPED,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice


def play(lane: str) -> float:
    messages, tokens = [{"role": "user", "content": f"say the {lane} number"}], list[int]()
    for _ in range(TURNS):
        choice = ask(messages)
        tokens += choice["token_ids"]
        messages += [choice["message"], {"role": "user", "content": "again"}]
    return sum(right(lane, token) for token in tokens) / max(1, len(tokens))


if __name__ == "__main__":
    sys.stdout.write(f"{play(os.environ['AJET_TASK'].partition('/')[0])}\n")
