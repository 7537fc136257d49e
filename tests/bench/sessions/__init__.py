"""Recorded sessions of agents: how long their calls were and what these had in common, and no word of them.

A file holds the calls of each episode. A call is a list of blocks ``[id, tokens]`` and the number of its last tokens
that were sampled. Equal ids are equal tokens at the same place, in any episode of the file; two calls that part have
other ids from there on. Sampled tokens are whole blocks.

- ``quickstart.json``: the games of the quick start's first step, played by its agent and its model with the model's own
  tokenizer and template, in transformers instead of vLLM.
- ``opencode.json``: opencode, as `.ci/integrations/node` locks it, on a task of the coding tutorial, run by ``ajet
  run`` and captured by ``ajet-proxy``. The scripted engine answers, in each episode otherwise. What opencode sends is
  its own: system prompt, tools, and what they return. The tokenizer of SmolLM2 counts the text of each call.

`tests.bench.sessions.record` records them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
Call = tuple[list[int], int]
"""The tokens of a call, and how many of them are sampled: its last ones."""
Blocks = tuple[list[tuple[int, int]], int]
"""The same as blocks, each an id and its number of tokens."""


def read(name: str) -> list[list[Blocks]]:
    """The calls of each episode."""
    episodes = json.loads((FOLDER / f"{name}.json").read_text())["episodes"]
    return [[([(block, size) for block, size in blocks], sampled) for blocks, sampled in calls] for calls in episodes]


def drawn(episodes: Sequence[Sequence[Blocks]], some: Callable[[int], list[int]]) -> list[list[Call]]:
    """Calls whose blocks have the tokens of ``some(size)``, which may be more or fewer."""
    found: dict[int, list[int]] = {}

    def call(blocks: list[tuple[int, int]], sampled: int) -> Call:
        tokens: list[int] = []
        prompt, left = 0, sum(size for _, size in blocks) - sampled
        for block, size in blocks:
            if block not in found:
                found[block] = some(size)
            tokens += found[block]
            prompt += len(found[block]) if left > 0 else 0
            left -= size
        return tokens, len(tokens) - prompt

    return [[call(*one) for one in calls] for calls in episodes]


def blocks_of(episodes: Sequence[Sequence[Call]]) -> list[list[Blocks]]:
    """The paths of the calls in the tree of their common beginnings, cut where samples begin."""
    calls = [one for mine in episodes for one in mine]
    paths: list[list[tuple[int, int]]] = [[] for _ in calls]
    open_: list[tuple[Iterable[int], int]] = [(range(len(calls)), 0)]
    number = 0
    while open_:
        members, start = open_.pop()
        groups: dict[int, list[int]] = {}
        for place in members:
            if len(calls[place][0]) > start:
                groups.setdefault(calls[place][0][start], []).append(place)
        for group in groups.values():
            end = _end_of(calls, group, start)
            for place in group:
                paths[place].append((number, end - start))
            number += 1
            open_.append((group, end))
    rest = iter(zip(paths, calls, strict=True))
    return [[(path, sampled) for path, (_, sampled) in (next(rest) for _ in mine)] for mine in episodes]


def _end_of(calls: Sequence[Call], group: Sequence[int], start: int) -> int:
    """Where these calls part, or one of them ends or begins to sample."""
    stops = [stop for place in group for stop in (len(calls[place][0]) - calls[place][1], len(calls[place][0]))]
    end, first = min(stop for stop in stops if stop > start), calls[group[0]][0]
    for place in range(start, end):
        if any(calls[one][0][place] != first[place] for one in group[1:]):
            return place
    return end
