"""The CPU time in which calls become timelines, and its growth with their number.

    python -m tests.bench.merge

Goal: 2,000 calls of one episode with contexts of 30,000 tokens in under 2 s, and linear growth. Four shapes of such an
episode, as the daemon keeps its calls, whose texts are a tree as they come: one chain that grows to 30,000 tokens;
agents of 20 turns each; calls that fork from one long history; a history that is edited before every call, so that each
begins a timeline and each break must be explained. (What timelines then cost as samples is linear in the tokens that
come out: 60 million where nothing is shared.) Then the ordinary, where the tree is made, too: agents with 20 turns of
about 40 new tokens, in random order, from 10 calls (one episode) to 10,000. Tokens are those of all prompts and outputs
that go in.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from ajet_proxy.core.tokens import count as tokens_in
from ajet_proxy.core.trajectory.texts import Texts
from ajet_proxy.core.trajectory.timeline import Packed, Turn, merge, merge_texts
from ajet_sdk.sample import Call
from tests.bench import table
from tests.kit.steps import own_s

RUNS = 5
TURNS, NEW = 20, 40
COUNTS = (10, 100, 1_000, 10_000)
LONG, SAMPLED, LIMIT_S = 30_000, 100, 2.0
GROWING = (250, 500, 1_000, 2_000)
LINEAR = 1.5
"""Twice the calls may cost twice as much, and so many times that."""


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


def packed(number: int, text: bytes, sampled: int) -> Packed:
    """A call that sampled the last tokens of `text`."""
    end = tokens_in(text)
    logprobs = array("d", [-0.5] * sampled).tobytes()
    turn = Turn(f"call-{number}", "m", "a", float(number), end - sampled, end, logprobs, "stop", ((1, sampled),))
    return Packed(turn, text)


def words(count: int, dice: random.Random) -> bytes:
    return array("i", (dice.randrange(150_000) for _ in range(count))).tobytes()


def chain(count: int, dice: random.Random) -> list[Packed]:
    step = LONG // count
    text = words(count * step, dice)
    return [packed(n, text[: (n + 1) * step * 4], max(1, step // 2)) for n in range(count)]


def turns(count: int, dice: random.Random) -> list[Packed]:
    texts = [words(LONG, dice) for _ in range(count // TURNS + 1)]
    return [packed(n, texts[n // TURNS][: (n % TURNS + 1) * (LONG // TURNS) * 4], SAMPLED) for n in range(count)]


def forks(count: int, dice: random.Random) -> list[Packed]:
    text = words(LONG - SAMPLED, dice)
    return [packed(n, text + words(SAMPLED, dice), SAMPLED) for n in range(count)]


def edits(count: int, dice: random.Random) -> list[Packed]:
    text, calls = array("i", words(LONG, dice)), []
    for number in range(count):
        text[dice.randrange(LONG // 2, LONG - SAMPLED)] = 150_000 + number
        calls.append(packed(number, text.tobytes(), SAMPLED))
    return calls


SHAPES: dict[str, Callable[[int, random.Random], list[Packed]]] = {
    "one chain": chain, f"agents of {TURNS} turns": turns, "forks of one history": forks, "edited histories": edits,
}  # fmt: skip


def long_episodes() -> bool:
    """The table of the long episodes; whether the goal is met."""
    rows, met = [], True
    for name, shape in SHAPES.items():
        seconds, tokens, timelines = [], 0, 0
        for number in GROWING:
            dice = random.Random(number)
            calls = shape(number, dice)
            dice.shuffle(calls)
            texts = Texts()
            placed = [(call.turn, texts.add(call.text, call.turn.call)) for call in calls]
            timelines = len(merge_texts(placed, texts, "strict"))
            seconds.append(own_s(partial(merge_texts, placed, texts, "strict"), RUNS))
            tokens = sum(tokens_in(call.text) for call in calls)
        good = seconds[-1] < LIMIT_S and linear(seconds)
        met = met and good
        figures = [f"{some:.3f}" for some in seconds]
        rows.append([name, f"{tokens:,}", f"{timelines:,}", *figures, "met" if good else "NOT MET"])
    head = ["an episode", "tokens in", "timelines", *(f"CPU s, {number:,} calls" for number in GROWING), "goal"]
    table.show(f"Merging contexts of {LONG:,} tokens, medians of {RUNS} runs", head, rows)
    return met


def linear(seconds: Sequence[float]) -> bool:
    return all(after < 2 * LINEAR * before or after < 0.1 for before, after in pairwise(seconds))


def ordinary() -> None:
    rows = []
    for count in COUNTS:
        calls = agents(count, random.Random(count))
        tokens = sum(len(call.prompt_token_ids) + len(call.token_ids) for call in calls)
        median = own_s(partial(merge, calls), RUNS)
        timelines = merge(calls)
        assert len(timelines) == -(-count // TURNS)
        rows.append([f"{count:,}", f"{tokens:,}", f"{len(timelines):,}", f"{median * 1e3:.1f}",
                     f"{median / count * 1e6:.0f}", f"{tokens / median / 1e6:.1f}"])  # fmt: skip
    head = ["calls", "tokens in", "timelines", "CPU ms", "CPU µs a call", "million tokens a CPU second"]
    table.show(f"Merging, medians of {RUNS} runs", head, rows)


def main() -> None:
    met = long_episodes()
    ordinary()
    table.verdicts([(f"2,000 calls of 30,000 tokens in under {LIMIT_S:g} s, linear", met)])


if __name__ == "__main__":
    main()
