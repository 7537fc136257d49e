"""Stands for ``opencode run … PROMPT`` where it is not installed: the model may run commands until it says something.

It takes the options that the tutorial gives it and reads the last word, which is the prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages, "tools": [TOOL]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return found


def main() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[-1]}]
    while calls := (message := ask(messages)).get("tool_calls"):
        messages.append(message)
        for call in calls:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    sys.stdout.write(f"{message['content']}\n")


if __name__ == "__main__":
    main()
