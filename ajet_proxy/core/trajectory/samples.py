"""Timelines become samples, the records that the trainer sees; with `tree_rows`, one record for each tree of them.

Invariant: a sample's mask is 1 exactly where one of its calls sampled. Its logprobs are the engine's there and 0.0
elsewhere. Its policy versions, and how it was sampled, count those same tokens in order. Its turns tell the order in
which the calls of an agent began, whatever samples they came into. A sample's reward is made of the rewards that
concern it: those without a scope, those of its agent and its model, and those of a call it holds.

A sample is named ``EPISODE/INDEX``, counted in the order of first calls, so that equal sets of calls give equal names.

Next: ajet_sdk/frame.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ajet_proxy.core.tokens import count, cut, unpack_tokens
from ajet_proxy.core.trajectory.call import prompt_hash
from ajet_proxy.core.trajectory.repair import join
from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_proxy.core.trajectory.timeline import Packed, Policy, Timeline, Turn, merge, pack, told
from ajet_sdk.sample import Call, PolicySpans, Sample, SamplingSpans

T = TypeVar("T")


def samples_of(
    timelines: Sequence[Timeline], *, episode: str, task: str, rewards: Collection[EpisodeReward] = ()
) -> Iterator[Sample]:
    """The samples of one episode, one for each of `timelines` after `repair.join`, in their order. Each is made when it
    is asked for: their tokens as numbers take many times the room of timelines."""
    places = _places(turn for timeline in timelines for turn in timeline.turns)
    return (
        Sample(
            sample=f"{episode}/{index}",
            episode=episode,
            task=task,
            model=timeline.model,
            agent=timeline.agent,
            token_ids=unpack_tokens(timeline.tokens),
            loss_mask=_mask(timeline),
            logprobs=_logprobs(timeline),
            policy_versions=_versions(timeline.turns),
            calls=tuple(turn.call for turn in timeline.turns),
            spans=tuple((turn.call, turn.start, turn.end) for turn in timeline.turns),
            reward=_reward(timeline.turns, rewards),
            broken_by=timeline.broken_by,
            uncertain_tokens=_uncertain(timeline.turns),
            repaired_tokens=timeline.repaired_tokens,
            sampling=_sampling(timeline.turns),
            finish_reasons=tuple(turn.finish_reason for turn in timeline.turns),
            turns=tuple(places[turn.call] for turn in timeline.turns),
        )
        for index, timeline in enumerate(join(timelines))
    )


def merge_calls(calls: Sequence[Call], policy: Policy = "strict") -> tuple[Sample, ...]:
    """The samples of one episode's calls, without rewards; the task is the hash of the first prompt."""
    first = min(calls, key=lambda call: (call.started_at, call.call))
    task = prompt_hash(first.prompt_token_ids)
    return tuple(samples_of(merge(calls, policy), episode=first.episode, task=task))


def _places(turns: Iterable[Turn]) -> dict[str, int]:
    """The place of each call among those of its model and agent, from 0, in the order in which they began."""
    seen, places = Counter[tuple[str, str]](), dict[str, int]()
    for turn in sorted(turns, key=lambda turn: turn.rank):
        places[turn.call] = seen[turn.model, turn.agent]
        seen[turn.model, turn.agent] += 1
    return places


def _mask(timeline: Timeline) -> tuple[int, ...]:
    mask = bytearray(len(timeline))
    for turn in timeline.turns:
        mask[turn.start : turn.end] = b"\1" * turn.sampled
    return tuple(mask)


def _logprobs(timeline: Timeline) -> tuple[float, ...]:
    logprobs = [0.0] * len(timeline)
    for turn in timeline.turns:
        logprobs[turn.start : turn.end] = turn.logprob_values()
    return tuple(logprobs)


def _versions(turns: Iterable[Turn]) -> PolicySpans:
    """The turns' versions in order."""
    return _runs(span for turn in turns for span in turn.policy_versions)


def _sampling(turns: Iterable[Turn]) -> SamplingSpans:
    """How the turns were sampled, in order; nothing if it is known of none."""
    runs = _runs((turn.sampling, turn.sampled) for turn in turns if turn.sampled)
    return () if all(text is None for text, _ in runs) else tuple((told(text), sampled) for text, sampled in runs)


def _runs(spans: Iterable[tuple[T, int]]) -> tuple[tuple[T, int], ...]:
    """`spans` of sampled tokens; equal neighbors become one."""
    runs: list[tuple[T, int]] = []
    for value, sampled in spans:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + sampled)
        else:
            runs.append((value, sampled))
    return tuple(runs)


def _uncertain(turns: Iterable[Turn]) -> int:
    return sum(turn.sampled for turn in turns if turn.version_uncertain)


def _reward(turns: Sequence[Turn], rewards: Iterable[EpisodeReward]) -> float | None:
    calls, agent, model = {turn.call for turn in turns}, turns[0].agent, turns[0].model
    mine = [reward for reward in rewards if reward.agent in (None, agent) and reward.model in (None, model)]
    return total(reward for reward in mine if reward.call is None or reward.call in calls)


def tree_rows(calls: Sequence[Call]) -> tuple[Sample, ...]:
    """One row for each tree of one episode's calls: calls of one model and agent whose texts begin with the same token.

    ``parents`` holds each token's predecessor. A token that two calls share as history stands once; a token that two
    calls sampled stands twice, because each sampled it with a logprob of its own. Each call's sampled tokens stand next
    to each other.
    """
    trees: dict[tuple[str, str, int | None], _Tree] = {}
    ordered = sorted(calls, key=lambda call: (call.started_at, call.call))
    for call in sorted(ordered, key=lambda call: len(call.prompt_token_ids)):
        packed = pack(call)
        root = (*call.prompt_token_ids[:1], *call.token_ids[:1], None)[0]
        trees.setdefault((call.model, call.agent, root), _Tree()).add(packed)
    task = prompt_hash(ordered[0].prompt_token_ids)
    rows = sorted(trees.values(), key=lambda tree: min(turn.rank for turn in tree.turns))
    places = _places(turn for tree in rows for turn in tree.turns)
    episode = ordered[0].episode
    return tuple(tree.row(f"{episode}/{index}", episode, task, places) for index, tree in enumerate(rows))


class _Tree:
    """Nodes in the order in which they were made. A node stands for one token after one history. `_first` finds, for a
    node and a token, the node that first continued it so. Calls come in the order of their prompts' lengths, so a
    sampled token is made before anyone has it as history."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.logprobs: list[float] = []
        self.sampled: list[int] = []
        self.turns: list[Turn] = []
        self._first: dict[tuple[int, int], int] = {}
        self._same: list[int] = []
        self._starts: list[int] = []

    def add(self, call: Packed) -> None:
        """Add `call`'s history, as far as it is new, and then its sampled tokens, which are always new."""
        turn, at = call.turn, -1
        for token in unpack_tokens(cut(call.text, 0, turn.start)):
            known = self._first.get((at, token))
            at = self._make(at, at, token, 0.0, 0) if known is None else known
        history = at
        self._starts.append(len(self.tokens))
        sampled = unpack_tokens(cut(call.text, turn.start, count(call.text)))
        for token, logprob in zip(sampled, turn.logprob_values(), strict=True):
            at = self._make(at, history, token, logprob, 1)
            history = self._same[at]
        self.turns.append(turn)

    def _make(self, parent: int, history: int, token: int, logprob: float, sampled: int) -> int:
        """A new node after `parent`. `history` is the node that first had the text which `parent` ends."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.logprobs.append(logprob)
        self.sampled.append(sampled)
        self._same.append(self._first.setdefault((history, token), node))
        return node

    def row(self, name: str, episode: str, task: str, places: Mapping[str, int]) -> Sample:
        order = sorted(range(len(self.turns)), key=lambda index: self._starts[index])
        turns = [self.turns[index] for index in order]
        starts = [self._starts[index] for index in order]
        spans = [(turn.call, at, at + turn.sampled) for turn, at in zip(turns, starts, strict=True)]
        return Sample(
            sample=name,
            episode=episode,
            task=task,
            model=turns[0].model,
            agent=turns[0].agent,
            token_ids=tuple(self.tokens),
            loss_mask=tuple(self.sampled),
            logprobs=tuple(self.logprobs),
            policy_versions=_versions(turns),
            calls=tuple(turn.call for turn in turns),
            spans=tuple(spans),
            uncertain_tokens=_uncertain(turns),
            parents=tuple(self.parents),
            sampling=_sampling(turns),
            finish_reasons=tuple(turn.finish_reason for turn in turns),
            turns=tuple(places[turn.call] for turn in turns),
        )
