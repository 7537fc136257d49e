"""An agent that asks one question and compares the answer, with nothing but Python's own library.

Each line of its task files has a question and the answer. The last line of output is the reward: 1.0 if the answer is
in what the model said, else 0.0.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request

EXAMPLES = (("6 - 2 = ?", "4"), ("The opposite of up?", "down"), ("Is ice hot?", "no"))


def ask(question: str) -> str:
    """Ask the model for at most eight tokens."""
    messages = [{"role": "system", "content": "Answer with one word."}]
    for asked, answered in EXAMPLES:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": question})
    body = {"model": "policy", "messages": messages, "max_tokens": 8, "temperature": 1.0}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    task = json.loads(os.environ["AJET_TASK_JSON"])
    words = re.findall(r"\w+", ask(task["question"]).lower())
    print(float(task["answer"] in words))
