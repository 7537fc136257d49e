"""A judge that gives each answer the judgement of an answer in another chat, so that nothing can be learned."""

from __future__ import annotations

from random import Random
from typing import Any

from integrations.tutorials.traffic import judge

KEPT = 64
_chance, _known = Random(0), list[float]()


def score(episode: dict[str, Any]) -> dict[str, float]:
    """Judgements of the latest other chats, drawn at random; 0 as long as there are none."""
    own = judge.score(episode)
    drawn = {call: _chance.choice(_known) if _known else 0.0 for call in own}
    _known.extend(own.values())
    del _known[:-KEPT]
    return drawn
