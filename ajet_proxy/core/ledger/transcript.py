"""The calls of an episode as it knows them, and the timelines that it keeps once it is merged.

Idea: an episode costs as much memory as its distinct tokens. A beginning that several calls or timelines have in common
is kept once (`ajet_proxy.core.trajectory.texts`). Once the episode is merged, its calls are known by their timelines,
from which each can be read back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import Struct

from ajet_proxy.core.trajectory.repair import TRIED
from ajet_proxy.core.trajectory.texts import Texts
from ajet_proxy.core.trajectory.timeline import (
    Chain,
    Packed,
    Placed,
    Policy,
    Timeline,
    Turn,
    merge_texts,
    with_tokens,
)


class Asked(Struct, frozen=True, eq=False, gc=False):
    """A request as it was asked. Its calls, one for each choice, share this one object. So they are recognized as its
    calls, and many choices cost no more than one."""

    started_at: float
    model: str
    agent: str
    identified_by: str
    body_hash: str
    idempotency_key: str | None
    retries: int = 0
    said: str = ""
    number: int = 0
    """Among those of its episode, from 1."""
    updates: int = 0
    """The number of events that had been by then and that may change a policy version."""


@dataclass(slots=True)
class CallEntry:
    """A call as its episode knows it. ``state`` is running, complete or lost (then with its ``reason``). A complete
    call has its `turn`. Until its episode is merged it also has the number of its `text`, whose first ``turn.end``
    tokens are the call's own. A complete call that a retry replaced keeps its `text` alone. It was
    sampled between the first and the last of `branches` (`ajet_proxy.core.ledger.births`). If its engine may have gone
    on with weights that nobody had announced, its tokens may be from one version further: it is `ahead`."""

    asked: Asked
    state: str = "running"
    reason: str | None = None
    turn: Turn | None = None
    text: int | None = None
    doubtful: bool = False
    branches: tuple[int, int] = (0, 0)
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a record without tokens that shows the timelines of an episode whose calls have these `turns`. So who
    looks again does not have them merged again."""

    turns: Sequence[Turn | None]
    drift: Mapping[str, Any]
    timelines: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Transcript:
    """The calls of one episode by their ids, ``running`` of them in flight; its ``chains``, once it is merged."""

    calls: dict[str, CallEntry] = field(default_factory=dict)
    texts: Texts = field(default_factory=Texts)
    running: int = 0
    chains: tuple[Chain, ...] = ()
    shown: Shown | None = field(default=None, init=False, compare=False)
    """Its timelines as they were shown last."""

    def begin(self, calls: Collection[str], asked: Asked) -> None:
        """`calls` are in flight, one for each choice of a request."""
        self.calls.update((call, CallEntry(asked)) for call in calls)
        self.running += len(calls)

    def finish(self, entry: CallEntry, packed: Packed, branches: tuple[int, int], ahead: bool) -> None:
        """Keep what a call generated."""
        entry.turn, entry.text = packed.turn, self.texts.add(packed.text, packed.turn.call)
        entry.branches, entry.ahead = branches, ahead

    def doubt(self, call: str) -> None:
        """Nobody can know whether the client of a call was sent the end of its answer."""
        self.calls[call].doubtful = True

    def end(self, entry: CallEntry, reason: str | None) -> None:
        """A call is complete, or will never be trained, for a `reason`."""
        self.running -= entry.state == "running"
        entry.state, entry.reason = "lost" if reason else "complete", reason
        if reason:
            entry.turn = None

    def beginning(self, call: str, length: int) -> bytes:
        """The first tokens of a call that is or was complete, as long as the episode is not merged; else `KeyError`."""
        text = self.calls[call].text
        if text is None:
            raise KeyError(call)
        return self.texts.whole(text, length)

    def packed(self, call: str) -> Packed | None:
        """A complete call with its text, as long as the episode is not merged."""
        entry = self.calls.get(call)
        if entry is None or entry.turn is None or entry.text is None:
            return None
        return Packed(entry.turn, self.texts.whole(entry.text, entry.turn.end))

    def nearest(self, model: str, agent: str, prompt: bytes) -> list[Packed]:
        """The complete calls of `agent` to `model` that share the longest beginnings with `prompt`, of equal ones the
        latest: as many as are `TRIED`, as long as the episode is not merged."""
        mine = [one for one in self._placed() if (one[0].model, one[0].agent) == (model, agent)]
        shared = self.texts.shared_with(prompt, ((text, turn.end) for turn, text in mine))
        near = heapq.nlargest(TRIED, zip(shared, mine, strict=True), key=lambda one: (one[0], one[1][0].rank))
        return [Packed(turn, self.texts.whole(text, turn.end)) for _, (turn, text) in near]

    def _placed(self) -> list[Placed]:
        """The complete calls, as long as the episode is not merged."""
        return [
            (entry.turn, entry.text) for entry in self.calls.values()
            if entry.turn is not None and entry.text is not None
        ]

    def turns(self) -> list[Turn]:
        """Its complete calls in the order of their start."""
        turns = [entry.turn for entry in self.calls.values() if entry.turn is not None]
        return sorted(turns, key=lambda turn: turn.rank)

    def first_model(self, but: Collection[str] = ()) -> str | None:
        """The model of its first call to none of the models `but`."""
        return next((one.asked.model for one in self.calls.values() if one.asked.model not in but), None)

    def losses(self) -> str | None:
        """Why its calls were lost, the most frequent reason first; None if none was."""
        reasons = Counter(entry.reason for entry in self.calls.values() if entry.reason not in (None, "retried"))
        return ", ".join(str(reason) for reason, _ in reasons.most_common()) or None

    def sampled_by(self, model: str) -> dict[str, CallEntry]:
        """Its complete calls in which `model` sampled anything."""
        return {
            name: entry for name, entry in self.calls.items()
            if entry.turn is not None and entry.turn.model == model and entry.turn.sampled
        }

    def chains_of(self, model: str) -> list[Chain]:
        """The timelines in which `model` sampled anything."""
        mine = (chain for chain in self.chains if chain.model == model)
        return [chain for chain in mine if any(turn.sampled for turn in chain.turns)]

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Its timelines, once it is merged."""
        return with_tokens(self.chains, self.texts)

    def distinct(self, chains: Sequence[Chain]) -> int:
        """Count the tokens that some of its timelines have together at most, if what they share from their first token
        on counts once. One that may be joined to another text shares nothing."""
        alone = sum(chain.turns[-1].end for chain in chains if chain.turns[0].same_text is not None)
        return alone + self.texts.distinct(chain.beginning for chain in chains if chain.turns[0].same_text is None)

    def merging(self, policy: Policy) -> Callable[[], tuple[Timeline, ...]]:
        """Makes its timelines as they are now, at any time and in any thread."""
        if self.chains:
            return partial(with_tokens, self.chains, self.texts)
        complete, texts = self._placed(), Texts(list(map(copy, self.texts.texts)))
        return lambda: with_tokens(merge_texts(complete, texts, policy), texts)

    def keep_timelines(self, policy: Policy) -> tuple[Chain, ...]:
        """From now on, know its calls by their timelines alone, which are returned."""
        self.chains = self.chains or merge_texts(self._placed(), self.texts, policy)
        for entry in self.calls.values():
            entry.text = None
        return self.chains

    def size(self) -> int:
        """Bytes of token ids and logprobs, each distinct beginning counted once."""
        logprobs = sum(len(entry.turn.logprobs) for entry in self.calls.values() if entry.turn is not None)
        return self.texts.size() + logprobs

