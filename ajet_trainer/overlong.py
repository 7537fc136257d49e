"""Answers that ran into their limit: a punishment that grows with their length (DAPO, arXiv:2503.14476, equation 13).

A call of n sampled tokens gets, with the maximum L, the buffer B and the factor f,

    0                         if n <= L - B
    -f * (n - (L - B)) / B    between
    -f                        if n >= L, or if the call ended at its limit of tokens (finish reason ``length``)

The largest punishment of an episode's calls is added to its reward. With credit by turn each call's own is added to the
reward of that call, and marked: what was rewarded together stays together. What agents gave stays in the figures of a
step as it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ajet_sdk.sample import BatchEpisode, Sample

LENGTH = "length"
"""The finish reason of a call that ran into its limit of tokens."""
PENALTY = "penalty"
"""The mark of a reward of ours: no agent gave it."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """The three numbers, as verl's ``reward.reward_kwargs`` has them: `limit` is ``max_resp_len``, and `buffer` and
    `factor` are ``len`` and ``penalty_factor`` of ``overlong_buffer_cfg``."""

    limit: int
    buffer: int
    factor: float

    def penalty(self, sampled: int, finish_reason: str) -> float:
        """The reward of a call for its length; at most 0."""
        if finish_reason == LENGTH:
            return -self.factor
        over = max(0, sampled - (self.limit - self.buffer))
        return -self.factor * min(1.0, over / self.buffer)


def ends(sample: Sample) -> Mapping[str, str]:
    """Why each call of `sample` ended."""
    return dict(zip(sample.calls, sample.finish_reasons, strict=True))


def punished(episode: BatchEpisode, shaping: Shaping, *, by_turn: bool) -> tuple[BatchEpisode, float]:
    """`episode` with its punishment in its rewards, and how large that is."""
    found = {
        call: shaping.penalty(end - start, ended[call])
        for sample in episode.samples for ended in (ends(sample),) for call, start, end in sample.spans
    }  # fmt: skip
    if by_turn:
        given = (
            {"value": value, "final": False, "call": call, PENALTY: True} for call, value in found.items() if value
        )
        return replace(episode, rewards=(*episode.rewards, *given)), sum(found.values())
    worst = min(found.values(), default=0.0)
    samples = (
        sample if sample.reward is None else replace(sample, reward=sample.reward + worst) for sample in episode.samples
    )
    return replace(episode, reward=episode.reward + worst, samples=tuple(samples)), worst
