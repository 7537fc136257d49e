"""Recorded sessions of agents: how long their calls were and what these had in common, and no word of them.

A file holds the calls of each episode. A call is a list of blocks ``[id, tokens]`` and the number of its last tokens
that were sampled. Equal ids are equal tokens at the same place, in any episode of the file; two calls that part have
other ids from there on. Sampled tokens are whole blocks.

- ``quickstart.json``: the games of the quick start's first step, played by its agent and its model with the model's own
  tokenizer and template, in transformers instead of vLLM.
- ``opencode.json``: opencode, as `.ci/integrations/node` locks it, on a task of the coding tutorial, run by ``ajet
  run`` and captured by ``ajet-proxy``. The scripted engine answers, in each episode otherwise. What opencode sends is
  its own: system prompt, tools, and what they return. The tokenizer of SmolLM2 counts the text of each call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
