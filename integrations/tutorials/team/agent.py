"""A sender is told a secret and says one letter. A receiver hears one word about that letter, and names the secret.

Each agent asks for the model of its own name. Neither can win alone: a sender that says the same of both secrets tells
nothing, and a receiver that answers the same to both words is not listening. The last line of output is the reward.
"""

from __future__ import annotations

import json
import os
import urllib.request


def ask(agent: str, word: str) -> bool:
    """Tell whether `agent` answers `word` with a letter of the second half of the alphabet."""
    body = {"model": agent, "messages": [{"role": "user", "content": word}], "max_tokens": 1, "temperature": 1.0}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"]) >= "n"


if __name__ == "__main__":
    secret = json.loads(os.environ["AJET_TASK_JSON"])["secret"]
    heard = "yes" if ask("sender", secret) else "no"
    named = "sun" if ask("receiver", heard) else "moon"
    print(float(named == secret))
