"""One choice of an answer: what its parts add up to, and what became of it.

Invariant: a choice is `Captured` only if every part of it came with ids, and if its prompt's ids, one logprob for each
sampled token and the word of a good end are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.protocol.answer_text import Piece
from ajet_proxy.core.protocol.logprobs import logprobs_of
from ajet_proxy.core.tokens import are_tokens
from ajet_proxy.core.trajectory.call import (
    CAPTURE_FAILED,
    ENGINE_ABORTED,
    ENGINE_ERROR,
    NO_LOGPROBS,
    NO_TOKEN_IDS,
    Captured,
    Lost,
)

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What reading an answer may raise that is not of the dialect."""
LOSSES = {"abort": ENGINE_ABORTED, "error": ENGINE_ERROR}
"""The finish reasons of a generation that did not come to its end."""


@dataclass(slots=True)
class Tally:
    """What came of one choice so far."""

    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    said: list[Piece] = field(default_factory=list, compare=False)
    versions: Any = None
    finish_reason: Any = None
    stop_reason: Any = None
    told: bool = False
    silent: bool = False

    def outcome(self, index: int, model: str, prompt: Any) -> Captured | Lost:
        """What became of choice number `index`, whose `prompt` is a tuple of ids if the engine told it well, and None
        if it did not tell it."""
        if not isinstance(self.finish_reason, str):
            return Lost(index, CAPTURE_FAILED)
        if (loss := LOSSES.get(self.finish_reason)) is not None:
            return Lost(index, loss)
        if self.silent or not self.told or prompt is None:
            return Lost(index, NO_TOKEN_IDS)
        if not isinstance(prompt, tuple) or not are_tokens(self.ids):
            return Lost(index, CAPTURE_FAILED)
        logprobs = logprobs_of(self.logprobs)
        if logprobs is None or len(logprobs) != len(self.ids):
            return Lost(index, NO_LOGPROBS)
        return Captured(
            index=index, model=model,
            prompt_token_ids=prompt,
            token_ids=tuple(self.ids),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_string=self.stop_reason if isinstance(self.stop_reason, str) else None,
            labels=_labels(self.versions, len(self.ids)),
        )


def _labels(spans: Any, sampled: int) -> tuple[tuple[str, int], ...]:
    """vLLM's ``weight_versions`` as runs of `sampled` tokens; none where they are not that."""
    out, at = [], 0
    try:
        for span in spans or ():
            label, start, end = span["version"], span["start"], span["end"]
            if not (isinstance(label, str) and type(end) is int and start == at < end):
                return ()
            out.append((label, end - start))
            at = end
    except UNREADABLE:
        return ()
    return tuple(out) if at == sampled else ()
