"""Sorts calls by the distribution that they were sampled from. Those that cannot be trained are left out by name.

The trainer computes logprobs of the whole vocabulary at one temperature a row. A call is

- *exact* if it was sampled from just that, and its logprobs are of what it was sampled from;
- *corrected* if something else shaped the distribution, and its logprobs are of the shaped one. Then the token-level
  weight, which is the trainer's probability over the engine's, is defined;
- *left out* if neither holds, or nothing was sampled at all;
- *unstated* if the daemon does not say how it was sampled, or the engine not what its defaults are.

`treat` leaves calls out of an episode: their tokens stay as history, with mask 0. A sample with calls at several
temperatures becomes one sample for each. `calls` stays, because the reward is that of all of them, and `spans` says
what is trained. A sample that loses all its calls stays, without a mask, since they belong to their episode.
Calls that ended at their limit of tokens are left out too, if `Rule.overlong` says so; their episode's reward counts
with the others (`advantage.Masked`). With credit by turn, so do all calls that are left out.

Invariant: what comes out keeps the laws that came in, and every call with sampled tokens is trained once, counted as
left out, or refused with its episode.

A grammar is applied to the logits before vLLM's sampler sees them. So raw logprobs are of the shaped distribution, too.

Next: ajet_trainer/advantage.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Literal, TypeVar

from ajet_sdk.sample import BatchEpisode, Sample
from ajet_trainer.advantage import Masked, counted
from ajet_trainer.overlong import LENGTH, Shaping, ends
from ajet_trainer.turns import ByTurn

T = TypeVar("T")
Runs = tuple[tuple[T, int], ...]
"""Values with the number of sampled tokens that each holds for, in order."""
Kind = Literal["exact", "corrected", "unstated", "left out"]

OTHERS = ("raw", "scored")
"""Logprobs that are known not to be of the shaped distribution, but for a grammar in raw ones."""
GRAMMAR = "structured"
CORRECTED = (
    GRAMMAR, "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "bad_words", "allowed_token_ids", "min_tokens", "thinking_token_budget",
)  # fmt: skip
"""The parameters that may shape a corrected call. vLLM applies each before it takes processed logprobs."""
PLAIN = ("temperature", "logprobs", "seed")
"""Facts that shape nothing, or that the trainer follows itself."""

OVERLONG = "overlong"
UNJUDGED = "unjudged"
PROCESSED = "start the engine with --logprobs-mode processed_logprobs"
DEFAULTS = "start the engine with --generation-config vllm, or have agents send the value"
ASKED = "agents ask for it, or the engine's defaults do, which --generation-config vllm removes"
OF_OURS = {
    PROCESSED: "set actor_rollout_ref.rollout.logprobs_mode in [verl] to processed_logprobs",
    DEFAULTS: "have agents send the value",
    ASKED: "agents ask for it, or actor_rollout_ref.rollout in [verl] does",
}
"""Advice in place of other advice, where the trainer itself has launched the engines, without the model's defaults."""
ADVICE = {
    "greedy": "nothing was sampled: have agents ask for a temperature above 0",
    "raw_logprobs": f"the logprobs are not of the distribution that was sampled from: {PROCESSED}",
    "scored_logprobs": "no grammar and no parameter is in logprobs that were asked for after the tokens: use chat "
    "completions",
    "unknown_logprobs": "their engine did not say what distribution the logprobs are of. Either it was too busy to "
    f"answer, and the daemon's log says so; or it is not vLLM. If it is: {PROCESSED}",
    "unstated": "the daemon does not say how they were sampled: its engine must be one that it can ask",
    "temperature": "this learner computes one temperature: set actor_rollout_ref.rollout.temperature in [verl] to it, "
    "or actor_rollout_ref.model.use_fused_kernels to false",
    UNJUDGED: "no reward reaches them, and nothing is compared with their episode: give each call a reward, or the "
    "episode",
    OVERLONG: "they ended at their limit of tokens, and overlong = mask in [trainer] does not train such calls",
}
"""Advice about a reason. The others are the names of what shaped the distribution."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of what is trained, and how: `sampling` and `no_signal` are those of the settings. With `overlong` calls
    that ended at their limit of tokens are not trained, and nothing that is older than the policy version `oldest`."""

    sampling: str = "correct"
    temperature: float = 1.0
    """The temperature of calls that do not tell theirs."""
    several: bool = True
    """True where the learner computes any other, too."""
    overlong: bool = False
    no_signal: str = "keep"
    oldest: int | None = None
    max_tokens: int | None = None
    """The tokens of the longest sample."""
    vocabulary: int | None = None
    """The number of token ids that the model knows, if it says so."""
    by_turn: ByTurn | None = None
    """The credit of turns, if rows bring their advantages along."""
    shaping: Shaping | None = None
    """The punishment for length, if there is one."""
    compares: bool = True
    """True where an episode's advantage is what it has above others of its group."""
    launched: bool = False
    """True where the trainer has launched the engines."""

    def verdict(self, facts: Mapping[str, Any] | None) -> Verdict:
        """Decides what becomes of a call under this rule."""
        found = judge(facts, self.temperature)
        if found.kind != "exact" and self.sampling != "correct":
            return replace(found, kind="left out")
        if not self.several and found.kind != "left out" and found.temperature != self.temperature:
            return replace(found, kind="left out", reason="temperature")
        return found


CORRECT = Rule()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kind of a call, the temperature under which it is trained, and in one word why it is not exact."""

    kind: Kind
    temperature: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Treated:
    """An episode as it is trained, and how many of its calls were left out, and are unstated, by reason. With `refused`
    none of it is trained."""

    episode: BatchEpisode
    left_out: Counter[str] = field(default_factory=Counter)
    unstated: Counter[str] = field(default_factory=Counter)
    refused: str | None = None


def judge(facts: Mapping[str, Any] | None, assumed: float) -> Verdict:
    """The kind of a call with these `facts`; `assumed` is the temperature of one that does not tell its own. What is
    known decides first: a call that is wrong whatever the engine's defaults are is not unstated."""
    if facts is None:
        return Verdict("unstated", assumed, "unstated")
    told = {name: value for name, value in facts.items() if value is not None}
    heat, logprobs = told.get("temperature", 1.0), told.get("logprobs")
    shaping = sorted(set(told) - set(PLAIN))
    if type(heat) not in (int, float) or not 0 <= heat < math.inf:
        return Verdict("left out", assumed, "temperature")
    if heat == 0 or told.get("top_k") == 1:
        return Verdict("left out", assumed, "greedy")
    if foreign := [name for name in shaping if name not in CORRECTED]:
        return Verdict("left out", assumed, "+".join(foreign))
    temperature = float(heat)
    within = set() if logprobs == "scored" else {GRAMMAR}
    if logprobs != "processed" and (temperature != 1.0 or set(shaping) - within):
        return Verdict("left out", assumed, f"{logprobs if logprobs in OTHERS else 'unknown'}_logprobs")
    if unknown := sorted(set(facts) - set(told) - {"seed", "logprobs"}):
        heat = assumed if "temperature" in unknown else temperature
        return Verdict("unstated", heat, f"unstated_{'+'.join(unknown)}")
    return Verdict("corrected" if shaping else "exact", temperature, "+".join(shaping))


def advice(reason: str, *, launched: bool = False) -> str:
    """Advice about calls of a `reason`: left out, or unstated. `launched`: the engines are the trainer's own."""
    said = ADVICE.get(reason, ASKED)
    if reason.startswith("unstated_"):
        said = f"the engine does not tell its defaults: {DEFAULTS}"
    for words, others in OF_OURS.items() if launched else ():
        said = said.replace(words, others)
    return said


def runs_of(sample: Sample) -> Runs[Mapping[str, Any] | None]:
    """The facts on how the tokens of `sample` were sampled, in runs."""
    return sample.sampling or ((None, sum(sample.loss_mask)),)


def temperature_of(sample: Sample, assumed: float) -> float:
    """The one temperature of a treated sample."""
    return judge(runs_of(sample)[0][0], assumed).temperature


def tokens_that_are(kind: Kind, sample: Sample) -> int:
    """Counts the sampled tokens of `sample` that belong to calls of a kind."""
    return sum(count for facts, count in runs_of(sample) if judge(facts, 1.0).kind == kind)


def computed(facts: Mapping[str, Any] | None) -> bool:
    """True if the trainer computes the distribution of a call with `facts`, as far as anybody tells."""
    return judge(facts, 1.0).kind in ("exact", "unstated")


def run_fault(sample: Sample) -> str | None:
    """Faults of the runs of a sample: they add up to its tokens, and none ends within a call."""
    if not sample.sampling:
        return None
    sampled = sum(sample.loss_mask)
    sizes = (end - start for _, start, end in sorted(sample.spans, key=itemgetter(1)))
    if sum(count for _, count in sample.sampling) != sampled:
        return f"the facts on sampling do not add up to the {sampled} sampled tokens"
    if not set(accumulate(count for _, count in sample.sampling)) <= set(accumulate(sizes)):
        return "the facts on sampling change within a call"
    return None


def treat(episode: BatchEpisode, rule: Rule) -> Treated:
    """`episode`, which is lawful, as it is trained under `rule`. With credit by turn, all calls count that are left
    out, as long as something of the episode is trained or overlong."""
    made = Treated(episode)
    samples, never = list[Sample](), set[str]()
    for sample in episode.samples:
        turns, kept, overlong = list(_turns(sample)), dict[float, list[SampledTurn]](), list[SampledTurn]()
        ended = ends(sample) if rule.overlong else {}
        for turn in turns:
            if ended.get(turn.call) == LENGTH:
                overlong.append(turn)
                made.left_out[OVERLONG] += 1
                continue
            verdict = rule.verdict(turn.facts)
            if verdict.kind != "left out":
                kept.setdefault(verdict.temperature, []).append(turn)
            elif rule.sampling == "strict":
                why = advice(verdict.reason, launched=rule.launched)
                return replace(made, refused=f"call {turn.call}: {verdict.reason} ({why})")
            counts = {"left out": made.left_out, "unstated": made.unstated}.get(verdict.kind)
            if counts is not None:
                counts[verdict.reason] += 1
        if [turns] == list(kept.values()) or not turns:
            samples.append(sample)
        elif kept:
            samples += _parts(sample, list(kept.values()))
        else:
            samples.append(_silent(sample, turns if rule.by_turn else overlong))
            never.update([] if overlong else [sample.sample])
    treated = replace(made, episode=replace(episode, samples=tuple(samples)))
    if made.left_out and all(sample.sample in never for sample in counted(treated.episode)):
        reason, _ = made.left_out.most_common(1)[0]
        why = advice(reason, launched=rule.launched)
        return replace(treated, refused=f"every call that was rewarded is left out: {reason} ({why})")
    return treated


def without(episode: BatchEpisode, calls: Collection[str]) -> Treated:
    """`episode`, which is treated, with these `calls` left out too: no reward reaches them."""
    samples, left_out = list[Sample](), Counter[str]()
    for sample in episode.samples:
        turns = list(_turns(sample))
        kept = [turn for turn in turns if turn.call not in calls]
        left_out[UNJUDGED] += len(turns) - len(kept)
        if len(kept) == len(turns):
            samples.append(sample)
        else:
            samples += _parts(sample, [kept]) if kept else [_silent(sample, turns)]
    return Treated(replace(episode, samples=tuple(samples)), +left_out)


def only_compared(episode: BatchEpisode) -> BatchEpisode:
    """`episode`, which is lawful, with no token to train, so that nothing but its reward counts."""
    silent = (_silent(one, turns) if (turns := list(_turns(one))) else one for one in episode.samples)
    return replace(episode, samples=tuple(silent))


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A call's sampled tokens in a sample: where they stand, how many were sampled before them, and how."""

    call: str
    start: int
    end: int
    before: int
    facts: Mapping[str, Any] | None


def _turns(sample: Sample) -> Iterator[SampledTurn]:
    """The calls of a lawful sample that sampled something, in order."""
    runs, left, before = iter(runs_of(sample)), 0, 0
    facts: Mapping[str, Any] | None = None
    for call, start, end in sorted(sample.spans, key=itemgetter(1)):
        if end > start:
            if not left:
                facts, left = next(runs)
            yield SampledTurn(call, start, end, before, facts)
            before, left = before + end - start, left - (end - start)


def _parts(sample: Sample, parts: Iterable[Sequence[SampledTurn]]) -> Iterator[Sample]:
    """`sample` once for each of the `parts`, which are some of its calls, up to the last token that is trained."""
    for index, turns in enumerate(parts):
        end = turns[-1].end
        mask, logprobs = bytearray(end), [0.0] * end
        for turn in turns:
            mask[turn.start : turn.end] = b"\x01" * (turn.end - turn.start)
            logprobs[turn.start : turn.end] = sample.logprobs[turn.start : turn.end]
        yield replace(
            sample,
            sample=f"{sample.sample}.{index}" if index else sample.sample,
            token_ids=sample.token_ids[:end],
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            policy_versions=_cut(sample.policy_versions, turns),
            sampling=_cut(sample.sampling, turns),
            spans=tuple((turn.call, turn.start, turn.end) for turn in turns),
            repaired_tokens=0 if index else sample.repaired_tokens,
            uncertain_tokens=min(sample.uncertain_tokens, sum(mask)),
        )


def _silent(sample: Sample, counting: Sequence[SampledTurn]) -> Sample:
    """The rest of `sample` if nothing of it is trained: its calls, and two tokens. If some calls are `counting`, its
    reward counts."""
    cut = replace(
        sample, token_ids=sample.token_ids[:2], loss_mask=(0, 0), logprobs=(0.0, 0.0), policy_versions=(), spans=(),
        sampling=(), repaired_tokens=0, uncertain_tokens=0,
    )  # fmt: skip
    if not counting:
        return cut
    versions = _cut(sample.policy_versions, counting)
    return Masked(**{item.name: getattr(cut, item.name) for item in fields(cut)} | {"policy_versions": versions})


def _cut(runs: Runs[T], turns: Iterable[SampledTurn]) -> Runs[T]:
    """Of the `runs` over a sample's tokens those of `turns`; equal neighbors become one."""
    values = [value for value, count in runs for _ in range(count)]
    kept = (value for turn in turns for value in values[turn.before : turn.before + turn.end - turn.start])
    return tuple((value, len(list(same))) for value, same in groupby(kept))
