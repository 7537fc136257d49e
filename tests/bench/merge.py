"""How fast calls become timelines in CPU time, and how that grows from 10 to 10,000 calls.

    python -m tests.bench.merge

The calls are those of agents with 20 turns of about 40 new tokens each, in random order: what one episode looks like
(10 to 20 calls) and far beyond it. Tokens are those of all prompts and outputs that go in.
"""

from __future__ import annotations

import random
import statistics
import time

from ajet_proxy.core.timeline import merge
from ajet_sdk.sample import Call
from tests.bench import table

RUNS = 5
TURNS, NEW = 20, 40
COUNTS = (10, 100, 1_000, 10_000)


def agents(count: int, dice: random.Random) -> list[Call]:
    """`count` calls of agents that each go on where their last call ended."""
    calls: list[Call] = []
    history: tuple[int, ...] = ()
    for number in range(count):
        if number % TURNS == 0:
            history = (1, 2, 3, number)
        prompt = history + tuple(dice.randrange(50_000) for _ in range(NEW // 2))
        sampled = tuple(dice.randrange(50_000) for _ in range(NEW // 2))
        history = prompt + sampled
        logprobs = (-0.5,) * len(sampled)
        versions = ((1, len(sampled)),)
        calls.append(
            Call(f"call-{number}", "ep", "m", "a", float(number), prompt, sampled, logprobs, "stop", versions)
        )
    dice.shuffle(calls)
    return calls


def main() -> None:
    rows = []
    for count in COUNTS:
        calls = agents(count, random.Random(count))
        tokens = sum(len(call.prompt_token_ids) + len(call.token_ids) for call in calls)
        seconds = []
        for _ in range(RUNS):
            began = time.process_time()
            timelines = merge(calls)
            seconds.append(time.process_time() - began)
        assert len(timelines) == -(-count // TURNS)
        median = statistics.median(seconds)
        rows.append([f"{count:,}", f"{tokens:,}", f"{len(timelines):,}", f"{median * 1e3:.1f}",
                     f"{median / count * 1e6:.0f}", f"{tokens / median / 1e6:.1f}"])  # fmt: skip
    head = ["calls", "tokens in", "timelines", "CPU ms", "CPU µs a call", "million tokens a CPU second"]
    table.show(f"Merging, medians of {RUNS} runs", head, rows)


if __name__ == "__main__":
    main()
