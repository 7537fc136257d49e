"""A sender knows a secret, and a receiver has to name it, of which it hears one of two signals.

    python -m tests.bench.team.game GROUP_SIZE PARALLEL

The signal is whether the token that the sender says is from the upper half of the vocabulary, and so is the answer of
the receiver. Both are rewarded alike: 1 if the answer is the secret. So a sender that says the same of both secrets, or
a receiver that answers the same to both signals, leaves the score at chance, whatever the other one does.

It knows nothing of models or trainers: an agent's name is the name of the model that it asks for.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from typing import Any

import ajet_sdk
from tests.e2e.players import HALF, UNSHAPED

SECRETS, SIGNALS = ("higher", "lower"), ("yes", "no")
TASKS = [f"{secret}-{number}" for number in range(500) for secret in SECRETS]
WORDS = 8


def upper(episode: ajet_sdk.Episode, agent: str, word: str) -> bool:
    """Tell whether what `agent` answers to `word`, said several times, is a token of the upper half."""
    body: dict[str, Any] = {
        "model": agent, "messages": [{"role": "user", "content": " ".join([word] * WORDS)}], "max_tokens": 1,
        "temperature": 1.0, "return_token_ids": True, **UNSHAPED,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json", "X-AJet-Agent": agent}
    url = f"{episode.base_url}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return bool(json.load(answer)["choices"][0]["token_ids"][0] >= HALF)


def play(task: str, episode: ajet_sdk.Episode) -> float:
    secret = task.partition("-")[0]
    signal = upper(episode, "sender", secret)
    return float(SECRETS[upper(episode, "receiver", SIGNALS[signal])] == secret)


if __name__ == "__main__":
    threading.stack_size(1 << 20)
    size, parallel = map(int, sys.argv[1:])
    members = {agent: agent for agent in ("sender", "receiver")}
    results = ajet_sdk.run(play, TASKS, size, parallel, members=members, play="game")
    sys.stdout.write(f"{results}\n")
