"""Plays `words` once with the model at OPENAI_BASE_URL, and prints the share of right answers: a held-out episode.

It does so without the `openai` package, which takes a second to import, since a gate plays 128 of them.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

from tests.bench.traffic import words


def say(text: str, messages: list[dict[str, str]]) -> str:
    """The model's answer to `text`, with which `messages` go on."""
    messages.append({"role": "user", "content": text})
    body = {"model": "policy", "messages": messages, "max_tokens": 1, "temperature": 1.0}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answered:
        said = json.load(answered)["choices"][0]["message"]["content"] or ""
    messages.append({"role": "assistant", "content": said})
    return str(said)


if __name__ == "__main__":
    history = [{"role": "system", "content": "Reply with one number."}]
    sys.stdout.write(f"{words.talk(lambda text: say(text, history), words.ALIKE)}\n")
