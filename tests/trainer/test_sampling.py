"""Calls are sorted by how they were sampled, and that an episode keeps its laws when calls are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_sdk.sample import BatchEpisode, Call, Sample
from ajet_trainer.admission import sample_faults
from ajet_trainer.batch import to_row
from ajet_trainer.sampling import ADVICE, CORRECTED, Rule, Treated, advice, judge, temperature_of, treat
from tests.kit.strategies import conversations, tangled_calls
from tests.trainer.making import PROCESSED, sample

RAW, UNKNOWN = {"logprobs": "raw"}, {"logprobs": "unknown"}
TOP_P = PROCESSED | {"top_p": 0.8}
GREEDY = PROCESSED | {"temperature": 0}


@pytest.mark.parametrize(
    ("facts", "kind", "temperature", "reason"),
    [
        (PROCESSED, "exact", 1.0, ""),
        (PROCESSED | {"seed": 7}, "exact", 1.0, ""),
        (PROCESSED | {"temperature": 0.7}, "exact", 0.7, ""),
        (RAW, "exact", 1.0, ""),
        (UNKNOWN, "exact", 1.0, ""),
        (RAW | {"temperature": 1}, "exact", 1.0, ""),
        (RAW | {"temperature": 0.7}, "left out", 1.0, "raw_logprobs"),
        (RAW | {"top_p": 0.8}, "left out", 1.0, "raw_logprobs"),
        ({"logprobs": "scored"}, "exact", 1.0, ""),
        ({"logprobs": "scored", "structured": "tools"}, "left out", 1.0, "scored_logprobs"),
        ({"logprobs": "scored", "temperature": 0.7}, "left out", 1.0, "scored_logprobs"),
        (RAW | {"structured": "regex"}, "corrected", 1.0, "structured"),
        (RAW | {"structured": "regex", "temperature": 0.7}, "left out", 1.0, "raw_logprobs"),
        (UNKNOWN | {"min_p": 0.1}, "left out", 1.0, "unknown_logprobs"),
        (TOP_P | {"top_k": 20, "temperature": 1.3}, "corrected", 1.3, "top_k+top_p"),
        (PROCESSED | {"logit_bias": {"5": 100}}, "corrected", 1.0, "logit_bias"),
        (GREEDY, "left out", 1.0, "greedy"),
        (RAW | {"temperature": 0.0}, "left out", 1.0, "greedy"),
        (PROCESSED | {"top_k": 1}, "left out", 1.0, "greedy"),
        (PROCESSED | {"vllm_xargs": {"a": 1}}, "left out", 1.0, "vllm_xargs"),
        (PROCESSED | {"temperature": "warm"}, "left out", 1.0, "temperature"),
        (PROCESSED | {"temperature": -1.0}, "left out", 1.0, "temperature"),
        (None, "unstated", 1.0, "unstated"),
        (PROCESSED | {"top_p": None}, "unstated", 1.0, "unstated_top_p"),
        (PROCESSED | {"top_p": None, "temperature": 0.7}, "unstated", 0.7, "unstated_top_p"),
        (PROCESSED | {"temperature": None, "seed": None}, "unstated", 1.0, "unstated_temperature"),
        (RAW | {"temperature": 0.7, "top_p": None}, "left out", 1.0, "raw_logprobs"),
        (PROCESSED | {"temperature": 0, "top_p": None}, "left out", 1.0, "greedy"),
    ],
)
def test_what_a_call_is(facts: Mapping[str, Any] | None, kind: str, temperature: float, reason: str) -> None:
    found = judge(facts, 1.0)
    assert (found.kind, found.temperature, found.reason) == (kind, temperature, reason)


def test_the_temperature_of_what_does_not_tell_it_is_assumed() -> None:
    assert judge(None, 0.6).temperature == judge({"temperature": None, **PROCESSED}, 0.6).temperature == 0.6
    assert judge(PROCESSED, 0.6).temperature == 1.0


@pytest.mark.parametrize("name", CORRECTED)
def test_each_thing_that_shapes_is_corrected_or_left_out_by_its_name(name: str) -> None:
    facts = PROCESSED | {name: 2}
    assert Rule().verdict(facts) == judge(facts, 1.0)
    assert judge(facts, 1.0).kind == "corrected"
    exact = Rule("exact").verdict(facts)
    assert (exact.kind, exact.reason) == ("left out", name)


def one(*facts: Mapping[str, Any] | None, name: str = "e/0") -> BatchEpisode:
    """An episode of one sample, with a call for each of `facts`."""
    return BatchEpisode("e", "t", "policy", 1.0, (), (sample(name, turns=len(facts), facts=facts),))


def masks(made: Treated) -> list[str]:
    return ["".join(map(str, part.loss_mask)) for part in made.episode.samples]


def test_what_is_all_trained_stays_as_it_is() -> None:
    for facts in ((PROCESSED, RAW), (TOP_P, None), (None, None)):
        episode = one(*facts)
        assert treat(episode, Rule()).episode.samples[0] is episode.samples[0]


def test_a_call_that_is_left_out_stays_as_history() -> None:
    made = treat(one(PROCESSED, GREEDY, TOP_P), Rule())
    assert masks(made) == ["0000" "111" "00000" "00" "111"]
    (part,) = made.episode.samples
    assert part.sampling == ((PROCESSED, 3), (TOP_P, 3)) and part.policy_versions == ((0, 6),)
    assert [call for call, _, _ in part.spans] == ["e/0/c0", "e/0/c2"]
    assert part.calls == ("e/0/c0", "e/0/c1", "e/0/c2"), "the reward is that of all"
    assert made.left_out == {"greedy": 1}
    assert masks(treat(one(PROCESSED, GREEDY), Rule())) == ["0000" "111"], "and what nothing follows is no history"


def test_a_sample_with_several_temperatures_becomes_one_for_each() -> None:
    warm = PROCESSED | {"temperature": 0.7}
    made = treat(one(PROCESSED, warm, TOP_P), Rule())
    assert masks(made) == ["0000" "111" "00000" "00" "111", "0000" "00000" "111"]
    assert [part.sample for part in made.episode.samples] == ["e/0", "e/0.1"]
    assert [temperature_of(part, 1.0) for part in made.episode.samples] == [1.0, 0.7]
    assert to_row("g", 0, 0, 1.0, made.episode.samples[1]).temperature == 0.7


def test_exact_trains_exact_calls_alone() -> None:
    made = treat(one(PROCESSED, TOP_P, None), Rule("exact"))
    assert masks(made) == ["0000" "111"]
    assert made.left_out == {"top_p": 1, "unstated": 1}


def test_strict_refuses_an_episode_by_the_name_of_a_call() -> None:
    assert treat(one(PROCESSED, PROCESSED | {"temperature": 0.3}), Rule("strict")).refused is None
    assert (treat(one(PROCESSED, TOP_P), Rule("strict")).refused or "").startswith("call e/0/c1: top_p (")
    assert (treat(one(PROCESSED, None), Rule("strict")).refused or "").startswith("call e/0/c1: unstated (the daemon")


def test_what_nobody_knows_the_sampling_of_is_trained_at_the_assumed_temperature() -> None:
    old = replace(one(PROCESSED), samples=(replace(sample("e/0"), sampling=()),))
    made = treat(old, Rule(temperature=0.6))
    assert (made.episode, made.unstated, made.refused) == (old, {"unstated": 1}, None)
    assert to_row("g", 0, 0, 1.0, old.samples[0], 0.6).temperature == 0.6
    assert treat(old, Rule("strict")).refused


def test_a_learner_of_one_temperature_leaves_out_the_others() -> None:
    warm = PROCESSED | {"temperature": 0.7}
    made = treat(one(PROCESSED, warm, GREEDY), Rule(temperature=0.7, several=False))
    assert masks(made) == ["0000" "00000" "111"]
    assert made.left_out == {"temperature": 1, "greedy": 1}


def test_what_was_rewarded_decides_whether_something_is_left() -> None:
    sampled = replace(sample("e/0"), agent="a", reward=1.0)
    two = (sampled, replace(sample("e/1", facts=(GREEDY,)), agent="b", reward=2.0))
    rewards = ({"value": 2.0, "agent": "b"},)
    unrewarded = replace(two[0], reward=None)
    assert treat(BatchEpisode("e", "t", "m", 3.0, rewards, two), Rule()).refused is None
    assert treat(BatchEpisode("e", "t", "m", 3.0, rewards, (unrewarded, two[1])), Rule()).refused


FACTS: list[Mapping[str, Any] | None] = [
    PROCESSED, PROCESSED | {"temperature": 0.7}, PROCESSED | {"temperature": 1.3}, TOP_P, GREEDY, RAW,
    RAW | {"temperature": 0.7}, None, PROCESSED | {"top_p": None},
]  # fmt: skip
RULES = [Rule(mode, several=several) for mode in ("correct", "exact", "strict") for several in (True, False)]


def episode_of(calls: Sequence[Call]) -> BatchEpisode:
    return BatchEpisode("ep", "t", "m", 1.0, (), merge_calls(calls))


@given(
    st.one_of(conversations(), tangled_calls()), st.lists(st.sampled_from(FACTS), min_size=12, max_size=12),
    st.sampled_from(RULES),
)  # fmt: skip
def test_every_call_is_trained_once_left_out_or_refused(
    plain: list[Call], facts: list[Mapping[str, Any] | None], rule: Rule
) -> None:
    """And the laws of contract §6.3 hold for what is left: prefixes, masks, logprobs, versions and facts by token."""
    calls = {
        call.call: replace(
            call, sampling=told, policy_versions=versions(call), prompt_token_ids=(9, *call.prompt_token_ids)
        )
        for call, told in zip(plain, facts, strict=False)
    }
    episode = episode_of(list(calls.values()))
    made = treat(episode, rule)
    verdicts = {name: rule.verdict(call.sampling) for name, call in calls.items() if call.token_ids}
    wanted = {name for name, verdict in verdicts.items() if verdict.kind != "left out"}
    if made.refused is not None:
        assert not wanted or (rule.sampling == "strict" and wanted != set(verdicts))
        return
    assert sum(made.left_out.values()) == len(verdicts) - len(wanted)
    held: list[str] = []
    for part in made.episode.samples:
        assert not list(sample_faults(part))
        held += trained_calls(part, calls, rule)
    assert sorted(held) == sorted(wanted)


def versions(call: Call) -> tuple[tuple[int, int], ...]:
    """Each token of its own version, so that a mistake of one place shows."""
    return tuple((place, 1) for place in range(len(call.token_ids)))


def trained_calls(part: Sample, calls: Mapping[str, Call], rule: Rule) -> list[str]:
    """The calls that `part` trains, after each was compared with itself token by token."""
    seen = [version for version, count in part.policy_versions for _ in range(count)]
    told = [facts for facts, count in part.sampling for _ in range(count)] or [None] * sum(part.loss_mask)
    heat = temperature_of(part, rule.temperature)
    found = []
    for name, start, end in part.spans:
        call, before = calls[name], sum(part.loss_mask[:start])
        if end == start:
            continue
        found.append(name)
        assert part.token_ids[:end] == (*call.prompt_token_ids, *call.token_ids)
        assert part.logprobs[start:end] == call.logprobs
        assert seen[before : before + end - start] == list(range(end - start))
        assert told[before : before + end - start] == [call.sampling] * (end - start)
        assert rule.verdict(call.sampling).temperature == heat
    return found


def test_every_reason_says_what_to_do() -> None:
    assert "--generation-config vllm" in advice("unstated_top_p") and "agents ask" in advice("top_p")
    assert "--logprobs-mode processed_logprobs" in advice("raw_logprobs")
    for reason in ("unstated_top_p", "top_p", *ADVICE):
        assert "--" not in advice(reason, launched=True), "nobody starts an engine that the trainer launches"
    assert "rollout.logprobs_mode" in advice("raw_logprobs", launched=True)
    assert set(ADVICE) == {
        "greedy", "raw_logprobs", "scored_logprobs", "unknown_logprobs", "unstated", "temperature",
        "overlong", "unjudged",
    }
