"""People who talk to the app: each thinks of a number, and tells in words what is wrong with a guess.

They give no reward, end no chat, and know nothing of ajet. What the app found out is known to them alone: the share of
the number, in bits, from 0 to 1, which is printed for each chat. They go on until they are stopped.

    python users.py
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LOWEST, HIGHEST, GUESSES = 1, 20, 4
PEOPLE, PAUSE_S = 16, 5.0
"""Who talk at a time, and how long each is away between two chats."""


def talk(secret: int, say: Callable[[str], str]) -> float:
    """One chat; `say` gives the app's answer."""
    low, high = LOWEST, HIGHEST
    said = say(f"Guess my number, {LOWEST} to {HIGHEST}.")
    for _ in range(GUESSES):
        numbers = re.findall("[0-9]+", said)
        guess = int(numbers[0]) if len(numbers) == 1 else None
        if guess == secret:
            say("Yes!")
            return 1.0
        if guess is None:
            said = say("Say one number.")
        elif not low <= guess <= high:
            said = say(f"I said {low} to {high}.")
        elif guess < secret:
            low, said = guess + 1, say("Higher.")
        else:
            high, said = guess - 1, say("Lower.")
    return 1 - math.log(high - low + 1) / math.log(HIGHEST - LOWEST + 1)


if __name__ == "__main__":
    from app import Chat  # type: ignore[import-not-found]
    from openai import OpenAIError

    def live(_: int) -> None:
        while True:
            try:
                print(f"{talk(random.randint(LOWEST, HIGHEST), Chat().say):.2f}", flush=True)
            except OpenAIError as error:
                print(f"the app is away: {type(error).__name__}", flush=True)
            time.sleep(PAUSE_S)

    with ThreadPoolExecutor(PEOPLE) as people:
        list(people.map(live, range(PEOPLE)))
