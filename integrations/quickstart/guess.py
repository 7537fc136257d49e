"""An agent that plays guess-the-number, written against the plain `openai` package.

It finds its model through OPENAI_BASE_URL and OPENAI_API_KEY alone and knows nothing of ajet. One run is one game: the
secret is the argument, the model has four turns, and between them the environment answers "Higher." or "Lower.". A
reply counts as a guess if it holds exactly one number.

The last line of output is the score, which is the share of the secret that was found out, in bits:
``1 - log(numbers still possible) / log(20)``. A right guess scores 1, an unusable reply rules nothing out.

    python guess.py 13
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable

LOWEST, HIGHEST, TURNS = 1, 20, 4
SYSTEM = "Reply with one number."
OPENING = f"Guess my number, {LOWEST} to {HIGHEST}."

Ask = Callable[[list[dict[str, str]]], str]


def play(secret: int, ask: Ask) -> float:
    """One game; `ask` gives the model's reply to the messages so far. Returns the score, 0 to 1."""
    low, high = LOWEST, HIGHEST
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": OPENING}]
    for _ in range(TURNS):
        reply = ask(messages)
        guess = number_in(reply)
        if guess == secret:
            return 1.0
        if guess is None:
            answer = "Say one number."
        elif guess < secret:
            low, answer = max(low, guess + 1), "Higher."
        else:
            high, answer = min(high, guess - 1), "Lower."
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    return 1 - math.log(high - low + 1) / math.log(HIGHEST - LOWEST + 1)


def number_in(reply: str) -> int | None:
    """The number of a reply that holds exactly one."""
    numbers = re.findall(r"[0-9]+", reply)
    return int(numbers[0]) if len(numbers) == 1 else None


def main() -> None:
    from openai import OpenAI

    client = OpenAI(timeout=1800, max_retries=0)

    def ask(messages: list[dict[str, str]]) -> str:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=6,
            temperature=1.0,
        )
        return answer.choices[0].message.content or ""

    sys.stdout.write(f"{play(int(sys.argv[1]), ask):.4f}\n")


if __name__ == "__main__":
    main()
