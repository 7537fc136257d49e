"""The beginning of a program, as Python: an agent that knows its model by environment variables alone."""

from __future__ import annotations

ASK = """
import json, os, sys, urllib.request

def ask(*said, model="stub"):
    messages = [{"role": ("user", "assistant")[place % 2], "content": one} for place, one in enumerate(said)]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 4})
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
AGENT = f"""{ASK}
print(len(ask(os.environ["AJET_TASK"])))
"""
"""It asks what its task is called."""
