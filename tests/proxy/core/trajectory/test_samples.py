"""The laws of contract §6.3 for samples, against the calls they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.views import delivered, record
from ajet_proxy.core.trajectory.call import prompt_hash
from ajet_proxy.core.trajectory.rewards import EpisodeReward
from ajet_proxy.core.trajectory.samples import merge_calls, samples_of
from ajet_proxy.core.trajectory.timeline import merge
from ajet_sdk.sample import Call, Sample
from tests.kit.ledger_rig import LedgerRig
from tests.kit.strategies import EPISODE, conversations, make_call, tangled_calls

some_calls = st.one_of(tangled_calls(), conversations())


def check_masks(samples: Sequence[Sample], calls: Sequence[Call]) -> None:
    """Laws 1 and 3."""
    by_name = {call.call: call for call in calls}
    seen: list[str] = []
    for sample in samples:
        length = len(sample.token_ids)
        assert length == len(sample.loss_mask) == len(sample.logprobs)
        sampled_at: list[int] = []
        versions: list[int] = []
        for name, start, end in sample.spans:
            call = by_name[name]
            assert sample.token_ids[start:end] == call.token_ids
            assert sample.logprobs[start:end] == call.logprobs
            sampled_at += range(start, end)
            versions += [version for version, count in call.policy_versions for _ in range(count)]
            assert (call.model, call.agent, call.episode) == (sample.model, sample.agent, sample.episode)
        assert len(set(sampled_at)) == len(sampled_at)
        assert [at for at in range(length) if sample.loss_mask[at]] == sorted(sampled_at)
        assert all(sample.logprobs[at] == 0.0 for at in range(length) if not sample.loss_mask[at])
        assert [version for version, count in sample.policy_versions for _ in range(count)] == versions
        assert all(count > 0 for _, count in sample.policy_versions)
        assert [span[0] for span in sample.spans] == list(sample.calls)
        assert sample.finish_reasons == tuple(by_name[name].finish_reason for name in sample.calls)
        check_sampling(sample, by_name)
        seen += sample.calls
    check_turns(samples, calls)
    assert sorted(seen) == sorted(by_name)


def check_turns(samples: Sequence[Sample], calls: Sequence[Call]) -> None:
    """Over all samples of a model and agent, the calls in the order of their turns are those in which they began."""
    for kind in {(call.model, call.agent) for call in calls}:
        mine = [sample for sample in samples if (sample.model, sample.agent) == kind]
        placed = sorted((turn, name) for sample in mine for name, turn in zip(sample.calls, sample.turns, strict=True))
        began = sorted((call.started_at, call.call) for call in calls if (call.model, call.agent) == kind)
        assert placed == [(place, name) for place, (_, name) in enumerate(began)]


def check_sampling(sample: Sample, by_name: Mapping[str, Call]) -> None:
    """Runs of all sampled tokens, each with how its call was sampled; none where no call tells."""
    told = [by_name[name].sampling for name in sample.calls for _ in by_name[name].token_ids]
    said = [sampling for sampling, count in sample.sampling for _ in range(count)]
    assert said == (told if any(one is not None for one in told) else [])
    assert all(count > 0 for _, count in sample.sampling)
    assert all(before != after for (before, _), (after, _) in pairwise(sample.sampling))


@given(some_calls)
def test_each_sampled_token_has_mask_one_exactly_once(calls: list[Call]) -> None:
    check_masks(merge_calls(calls), calls)
    check_masks(merge_calls(calls, "off"), calls)


@given(some_calls)
def test_every_call_is_a_prefix_of_the_sample_that_holds_it(calls: list[Call]) -> None:
    by_name = {call.call: call for call in calls}
    for sample in merge_calls(calls):
        for name, start, end in sample.spans:
            assert sample.token_ids[:end] == by_name[name].prompt_token_ids + by_name[name].token_ids
            assert start == len(by_name[name].prompt_token_ids)
        assert [start for _, start, _ in sample.spans] == sorted(start for _, start, _ in sample.spans)


@given(some_calls)
def test_neighbours_of_one_version_are_one_run(calls: list[Call]) -> None:
    for sample in merge_calls(calls):
        versions = [version for version, _ in sample.policy_versions]
        assert all(a != b for a, b in pairwise(versions))


def test_a_version_that_changes_within_a_call_is_kept() -> None:
    first = make_call("a", [1], [2, 3, 4], versions=[(1, 1), (2, 2)])
    (sample,) = merge_calls([first, make_call("b", [1, 2, 3, 4], [5], at=1, version=2)])
    assert sample.policy_versions == ((1, 1), (2, 3))


def test_samples_are_named_by_their_place_and_the_task_by_the_first_prompt() -> None:
    calls = [make_call("b", [5], [6], at=1), make_call("a", [1], [2], at=2)]
    samples = merge_calls(calls)
    assert [sample.sample for sample in samples] == ["ep/0", "ep/1"]
    assert [sample.calls for sample in samples] == [("b",), ("a",)]
    assert {sample.task for sample in samples} == {prompt_hash([5])}
    assert [sample.broken_by for sample in samples] == [None, "new_chain"]


def test_what_is_delivered_is_of_one_model_and_has_the_rewards_that_its_batch_had() -> None:
    rig = LedgerRig()
    name = rig.open(task="t")
    for model in "mn":
        rig.call(name, (1, 2), (3,), model=model)
    for value in (0.5, 0.25):
        rig.reward(name, value, final=False)
    rig.seal(name)
    episode = rig.state.episodes[name]
    (sample,) = delivered(episode, "m", None).samples
    assert (sample.model, sample.task, sample.token_ids, sample.reward) == ("m", "t", (1, 2, 3), 0.75)
    first = delivered(episode, "n", 1)
    assert (first.episode, first.model, first.reward, len(first.rewards)) == (name, "n", 0.5, 1)


def test_a_model_is_shown_no_reward_of_a_call_or_an_agent_of_another() -> None:
    rig = LedgerRig()
    name = rig.open(task="t", members={"sends": "m", "takes": "n"})
    call = rig.call(name, (1, 2), (3,), model="m", agent="sends")
    for model, agent in (("n", "takes"), ("m", "both"), ("n", "both")):
        rig.call(name, (1, 2), (3,), model=model, agent=agent)
    scopes: list[dict[str, Any]] = [
        {"call": call}, {"agent": "sends"}, {"agent": "takes"}, {"agent": "both"}, {"agent": "misspelt"}, {},
    ]  # fmt: skip
    for power, scope in enumerate(scopes):
        rig.reward(name, 2.0**power, final=False, **scope)
    assert {model: one["reward"] for model, one in record(rig.state, name)["models"].items()} == {"m": 59.0, "n": 60.0}
    rig.seal(name)
    episode = rig.state.episodes[name]
    assert [delivered(episode, model, None).reward for model in "mn"] == [59.0, 60.0]
    assert [delivered(episode, model, 3).reward for model in "mn"] == [3.0, 4.0]
    for model in "mn":
        whole = {sample["sample"]: sample["reward"] for sample in record(rig.state, name, tokens="all")["timelines"]}
        assert all(one.reward == whole[one.sample] for one in delivered(episode, model, None).samples)


# ---- rewards


def reward(value: float, *, call: str | None = None, agent: str | None = None, final: bool = False) -> EpisodeReward:
    return EpisodeReward(f"r{value}", value, call, agent, final, None, 0.0)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], [None, None, None]),
        ([reward(1.0)], [1.0, 1.0, 1.0]),
        ([reward(1.0, final=True), reward(0.25)], [1.25, 1.25, 1.25]),
        ([reward(1.0, final=True), reward(0.5, final=True)], [0.5, 0.5, 0.5]),
        ([reward(1.0, agent="solver")], [1.0, 1.0, None]),
        ([reward(1.0, agent="critic"), reward(0.5)], [0.5, 0.5, 1.5]),
        ([reward(1.0, call="a2"), reward(0.5, final=True)], [1.5, 0.5, 0.5]),
        ([reward(1.0, call="b", agent="critic")], [None, None, None]),
        ([reward(0.0)], [0.0, 0.0, 0.0]),
    ],
)
def test_a_sample_gets_the_rewards_that_concern_it(rewards: list[EpisodeReward], expected: list[float | None]) -> None:
    calls = [
        make_call("a1", [1], [2], at=0, agent="solver"), make_call("a2", [1, 2, 3], [4], at=1, agent="solver"),
        make_call("b", [9], [8], at=2, agent="solver"), make_call("c", [1], [2], at=3, agent="critic"),
    ]
    samples = tuple(samples_of(merge(calls), episode="ep", task="t", rewards=rewards))
    assert [sample.reward for sample in samples] == expected


def test_a_sample_says_how_many_of_its_tokens_have_uncertain_versions() -> None:
    sure = make_call("a", (1,), (2, 3), at=1)
    unsure = replace(make_call("b", (1, 2, 3, 4), (5, 6, 7), at=2), version_uncertain=True)
    assert [sample.uncertain_tokens for sample in merge_calls([sure, unsure])] == [3]
    assert merge_calls([sure])[0].uncertain_tokens == 0
    (timeline,) = merge([sure, unsure])
    assert [turn.to_call(timeline.tokens, EPISODE) for turn in timeline.turns] == [sure, unsure]
    assert [turn.summary(EPISODE).get("version_uncertain") for turn in timeline.turns] == [None, True]
