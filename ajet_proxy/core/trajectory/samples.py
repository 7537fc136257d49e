"""Timelines become samples, the records that the trainer sees.

Invariant: a sample's mask is 1 exactly where one of its calls sampled. Its logprobs are the engine's there and 0.0
elsewhere. Its policy versions, and how it was sampled, count those same tokens in order. Its turns tell the order in
which the calls of an agent began, whatever samples they came into. A sample's reward is made of the rewards that
concern it: those without a scope, those of its agent and its model, and those of a call it holds.

A sample is named ``EPISODE/INDEX``, counted in the order of first calls, so that equal sets of calls give equal names.

Next: ajet_sdk/frame.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from ajet_proxy.core.tokens import common_prefix, cut, unpack_tokens
from ajet_proxy.core.trajectory.call import prompt_hash
from ajet_proxy.core.trajectory.repair import join
from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_proxy.core.trajectory.timeline import Policy, Timeline, Turn, merge, told
from ajet_sdk.sample import Call, Sample, SamplingSpans

T = TypeVar("T")


def samples_of(
    timelines: Sequence[Timeline], *, episode: str, task: str, rewards: Collection[EpisodeReward] = ()
) -> Iterator[Sample]:
    """The samples of one episode, one for each of `timelines` after `repair.join`, in their order. Each is made when it
    is asked for: their tokens as numbers take many times the room of timelines."""
    places, joined = _places(turn for timeline in timelines for turn in timeline.turns), join(timelines)
    return (
        Sample(
            sample=f"{episode}/{index}",
            episode=episode,
            task=task,
            model=timeline.model,
            agent=timeline.agent,
            token_ids=token_ids,
            loss_mask=_mask(timeline),
            logprobs=_logprobs(timeline),
            policy_versions=_runs(span for turn in timeline.turns for span in turn.policy_versions),
            calls=tuple(turn.call for turn in timeline.turns),
            spans=tuple((turn.call, turn.start, turn.end) for turn in timeline.turns),
            reward=_reward(timeline.turns, rewards),
            broken_by=timeline.broken_by,
            uncertain_tokens=sum(turn.sampled for turn in timeline.turns if turn.version_uncertain),
            repaired_tokens=timeline.repaired_tokens,
            sampling=_sampling(timeline.turns),
            finish_reasons=tuple(turn.finish_reason for turn in timeline.turns),
            turns=tuple(places[turn.call] for turn in timeline.turns),
        )
        for index, (timeline, token_ids) in enumerate(zip(joined, _ids(joined), strict=True))
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


def _ids(timelines: Iterable[Timeline]) -> Iterator[tuple[int, ...]]:
    """The tokens of each as numbers. What one shares with the one before it are the same objects, since an object takes
    four times the room of its place in a tuple."""
    text, ids = b"", tuple[int, ...]()
    for timeline in timelines:
        shared = common_prefix(text, timeline.tokens)
        ids = ids[:shared] + unpack_tokens(cut(timeline.tokens, shared, len(timeline)))
        text = timeline.tokens
        yield ids


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


def _sampling(turns: Iterable[Turn]) -> SamplingSpans:
    """Tell how the turns were sampled, in order; nothing if it is known of none."""
    runs = _runs((turn.sampling, turn.sampled) for turn in turns if turn.sampled)
    return () if all(text is None for text, _ in runs) else tuple((told(text), sampled) for text, sampled in runs)


def _runs(spans: Iterable[tuple[T, int]]) -> tuple[tuple[T, int], ...]:
    """`spans` of sampled tokens; equal neighbors become one."""
    return tuple((value, sum(sampled for _, sampled in run)) for value, run in groupby(spans, itemgetter(0)))


def _reward(turns: Sequence[Turn], rewards: Iterable[EpisodeReward]) -> float | None:
    calls, agent, model = {turn.call for turn in turns}, turns[0].agent, turns[0].model
    mine = [reward for reward in rewards if reward.agent in (None, agent) and reward.model in (None, model)]
    return total(reward for reward in mine if reward.call is None or reward.call in calls)
