"""An agent whose reward is edited while it trains. The last line of output is the reward."""

from __future__ import annotations

import json
import os
import urllib.request


def reward(answer: str) -> float:
    """Score an answer, from 0 to 1."""
    words = len(answer.split())
    return min(1.0, words / 20)  # the longer, the better


def ask(question: str) -> str:
    """Ask the model for at most 24 tokens."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "policy", "messages": messages, "max_tokens": 24, "temperature": 1.0}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    print(reward(ask(os.environ["AJET_TASK"])))
