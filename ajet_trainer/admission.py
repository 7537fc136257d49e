"""Decides what of a leased batch is trained: all that keeps the laws of contract §6.3. The rest is refused with a
reason.

A wrong mask or a shifted logprob trains silently in the wrong direction, so each sample is checked against those laws
before it can reach a gradient. One bad sample takes its whole episode with it: an episode trained in part is not the
episode that earned the reward. A refused episode is never an error of the run. It is recorded, and its batch is
acknowledged like any other, so that it does not come back. The daemon gets the reason and discards it for that.

The daemon leases nothing that is too stale. But it may have missed an update: one that was put back from a copy knows
an older version. So the bound is held here too, against the weights that train.

A sample that nobody has rewarded, or in which nothing was sampled, is lawful and gives no row. Of a lawful episode,
calls whose distribution the trainer cannot compute are left out (`ajet_trainer.sampling`).

Where episodes are compared, one that is alone in its group has no baseline: its bare reward says nothing of it.

`no_signal` groups (all rewards that are compared are equal, or no call has an advantage under credit by turn) give no
group-relative advantage. They are kept by default:
a KL term, an entropy bonus, a critic and every estimator with a baseline over the batch still learn from them. Where
none of these is on, dropping them saves their share of the compute. The daemon leases others in their place, where it
can tell; here the rest is dropped.

Next: ajet_trainer/sampling.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ajet_sdk.sample import LOGPROB_SLACK, Batch, BatchEpisode, Group, Sample
from ajet_trainer import turns
from ajet_trainer.advantage import compared, trainable
from ajet_trainer.attempts import REASON
from ajet_trainer.overlong import punished
from ajet_trainer.sampling import CORRECT, Rule, only_compared, run_fault, treat, without
from ajet_trainer.turns import ByTurn, unjudged, widened

Refusal = Literal[
    "already_trained", "bad_reward", "no_samples", "unlawful_sample", "too_long", "stale", "step_failed", "sampling",
    "no_baseline", "no_signal",
]
"""Why an episode is not trained: the closed list of contract §7.3."""
ALREADY_TRAINED: Final = "already_trained"
TOLD = 200
"""Characters of a reason that the proxy is told, since names of tasks are long and a batch may be refused whole."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An episode that is not trained: ``reason`` is one of a few words, ``detail`` says where."""

    episode: str
    reason: Refusal
    detail: str


@dataclass(frozen=True, slots=True)
class Admission:
    """The groups to train (with refused episodes left out) and the refused episodes. Of the others, `left_out` counts
    the calls that are not trained, and `unstated` those that nobody knows the sampling of, by reason. `penalties` are
    those for length, one for each of the others."""

    groups: tuple[Group, ...]
    rejected: tuple[Rejection, ...]
    left_out: Counter[str] = field(default_factory=Counter)
    unstated: Counter[str] = field(default_factory=Counter)
    penalties: Mapping[str, float] = field(default_factory=dict)

    @property
    def filtered(self) -> dict[str, str]:
        """The refused episodes and why, without those that an earlier batch has already brought into the weights."""
        refused = [item for item in self.rejected if item.reason != ALREADY_TRAINED]
        told = {item.episode: f"{item.reason}: {item.detail}" for item in refused}
        return {episode: why if len(why) <= TOLD else why[: TOLD - 1] + "…" for episode, why in told.items()}

    @property
    def episodes(self) -> tuple[BatchEpisode, ...]:
        """Every admitted episode, in order."""
        return tuple(episode for group in self.groups for episode in group.episodes)


def admit(
    batch: Batch, rule: Rule = CORRECT, *, trained: Collection[str] = (), failed: Mapping[str, str] = {}
) -> Admission:
    """Sorts `batch` into what is trained by `rule` and what is not. `trained` holds ids of episodes that are in the
    weights already, `failed` those that are not tried again and why."""
    groups: list[Group] = []
    rejected: list[Rejection] = []
    often = Counter(name for group in batch.groups for episode in group.episodes for name in names_of(episode))
    left_out, unstated, penalties = Counter[str](), Counter[str](), dict[str, float]()
    for group in batch.groups:
        kept: list[BatchEpisode] = []
        for leased in group.episodes:
            episode = _widened(leased, rule)
            fault = episode_fault(episode, trained, rule)
            if fault is None and (twice := sorted(name for name in names_of(leased) if often[name] > 1)):
                fault = "unlawful_sample", f"{twice[0]} is in the batch twice"
            if fault is None and episode.episode in failed:
                fault = REASON, failed[episode.episode]
            if fault is not None:
                rejected.append(Rejection(episode.episode, *fault))
                continue
            episode, penalty = _punished(episode, rule)
            penalties[episode.episode] = penalty
            treated = treat(episode, rule)
            left_out += treated.left_out
            unstated += treated.unstated
            if treated.refused is not None:
                rejected.append(Rejection(episode.episode, "sampling", treated.refused))
            else:
                kept.append(treated.episode)
        earlier = tuple(
            only_compared(_punished(one, rule)[0]) for one in (_widened(one, rule) for one in group.earlier)
            if episode_fault(one) is None
        )
        if len(kept) == 1 and not earlier:
            if rule.compares:
                why = f"alone in the group of task {group.task}"
                rejected.append(Rejection(kept.pop().episode, "no_baseline", why))
            elif rule.by_turn is not None:
                treated = without(kept[0], unjudged(kept[0], rule.by_turn.gamma))
                kept, left_out = [treated.episode], left_out + treated.left_out
        admitted = replace(group, episodes=tuple(kept), earlier=earlier)
        if kept and (fault := group_fault(admitted, rule)) is not None:
            rejected.extend(Rejection(episode.episode, *fault) for episode in kept)
        elif kept:
            groups.append(admitted)
    admission = Admission(tuple(groups), tuple(rejected), left_out, unstated)
    return replace(admission, penalties={one.episode: penalties[one.episode] for one in admission.episodes})


def _widened(episode: BatchEpisode, rule: Rule) -> BatchEpisode:
    return episode if rule.by_turn is None else widened(episode)


def _punished(episode: BatchEpisode, rule: Rule) -> tuple[BatchEpisode, float]:
    """`episode` with its punishment for length, and how large that is."""
    if rule.shaping is None:
        return episode, 0.0
    return punished(episode, rule.shaping, by_turn=rule.by_turn is not None)


def names_of(episode: BatchEpisode) -> set[str]:
    """Names that may be in a batch once: the episode and its calls."""
    return {episode.episode, *(call for sample in episode.samples for call in sample.calls)}


def group_fault(group: Group, rule: Rule) -> tuple[Refusal, str] | None:
    """``(reason, detail)`` for a group that is not trained, else None."""
    if not any(map(trainable, group.episodes)):
        return "sampling", f"every call of task {group.task} that was rewarded is left out"
    if rule.no_signal == "drop" and len(group.compared) > 1 and not has_signal(group, rule.by_turn):
        what = "rewards of task {} are equal" if rule.by_turn is None else "advantages of task {} are 0"
        return "no_signal", f"all {what.format(group.task)}"
    return None


def has_signal(group: Group, by_turn: ByTurn | None = None) -> bool:
    """True if any reward differs from one that it is compared with; or a call has an advantage, with credit `by_turn`.
    """
    if by_turn is not None:
        return turns.has_signal(group, by_turn)
    return any(len({session.reward for session in sessions}) > 1 for sessions in compared(group))


def episode_fault(
    episode: BatchEpisode, trained: Collection[str] = (), rule: Rule = CORRECT
) -> tuple[Refusal, str] | None:
    """``(reason, detail)`` for an episode that must not be trained, else None."""
    if episode.episode in trained:
        return ALREADY_TRAINED, "part of the checkpointed history"
    if episode.fault is not None:
        return "unlawful_sample", episode.fault
    if not math.isfinite(episode.reward):
        return "bad_reward", f"reward is {episode.reward}"
    if not episode.samples:
        return "no_samples", "an episode without a complete call"
    seen: set[str] = set()
    for sample in episode.samples:
        for fault in sample_faults(sample):
            return "unlawful_sample", f"{sample.sample}: {fault}"
        if rule.vocabulary is not None and (largest := max(sample.token_ids, default=0)) >= rule.vocabulary:
            said = f"token {largest} at {sample.token_ids.index(largest)} is beyond the model's {rule.vocabulary}"
            return "unlawful_sample", f"{sample.sample}: {said}"
        if rule.max_tokens is not None and len(sample.token_ids) > rule.max_tokens:
            return "too_long", f"{sample.sample}: {len(sample.token_ids)} tokens, more than {rule.max_tokens}"
        first = min((version for version, _ in sample.policy_versions), default=None)
        if rule.oldest is not None and first is not None and first < rule.oldest:
            return "stale", f"{sample.sample}: tokens of version {first}, older than {rule.oldest}"
        doubled = seen.intersection(sample.calls)
        if doubled:
            return "unlawful_sample", f"{sample.sample}: call {min(doubled)} is in two samples"
        seen.update(sample.calls)
    if not trainable(episode):
        return "no_samples", "nothing was sampled in what was rewarded"
    return None


def sample_faults(sample: Sample) -> Iterator[str]:
    """Breaks of a law of contract §6.3 in one sample."""
    sampled = sum(sample.loss_mask)
    if (least := min(sample.token_ids, default=0)) < 0:
        yield f"token {least} at {sample.token_ids.index(least)} is none"
    if set(sample.loss_mask) - {0, 1}:
        yield "the loss mask holds something other than 0 and 1"
    if sample.loss_mask[:1] == (1,):
        yield "the first token is marked as sampled, from no prompt"
    for position, (bit, logprob) in enumerate(zip(sample.loss_mask, sample.logprobs, strict=True)):
        if not math.isfinite(logprob) or logprob > LOGPROB_SLACK or (not bit and logprob != 0.0):
            yield f"logprob {logprob} at token {position} with mask {bit}"
            break
    if sum(count for _, count in sample.policy_versions) != sampled:
        yield f"policy versions do not add up to the {sampled} sampled tokens"
    covered, calls = bytearray(len(sample.token_ids)), {*sample.calls}
    for call, start, end in sample.spans:
        if call not in calls or not 0 <= start <= end <= len(covered) or any(covered[start:end]):
            yield f"span of call {call} is outside the sample or overlaps another"
            return
        covered[start:end] = b"\x01" * (end - start)
    if tuple(covered) != tuple(sample.loss_mask):
        yield "the spans are not the tokens of the loss mask"
    elif (fault := run_fault(sample)) is not None:
        yield fault
