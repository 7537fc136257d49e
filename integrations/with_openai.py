"""An agent on the plain `openai` package. Nothing in it knows ajet.

    ajet run --task sum/17+25 --repeat 8 --parallel 4 -- python integrations/with_openai.py 17 25

The client finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code says whether the model
got the sum right within three turns, and becomes the reward.
"""

from __future__ import annotations

import re
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

TURNS = 3


def main(first: int, second: int) -> int:
    client = OpenAI()
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": f"What is {first} + {second}?"},
    ]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32).choices[0].message
        numbers = re.findall(r"-?\d+", answer.content or "")
        if numbers and int(numbers[-1]) == first + second:
            return 0
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": "That is wrong. Try again."})
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
