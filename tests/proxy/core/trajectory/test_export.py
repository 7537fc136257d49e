"""Rows for other trainers: what is learnt is what was sampled, and a pair differs in nothing but its answers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.trajectory.export import NO_LABEL, Place, pairs, place, preference_row, prompt_length, sft_row
from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_sdk.sample import Sample
from tests.kit.strategies import conversations, make_call


def sample_of(
    *sampled: int, episode: str = "e", reward: float | None = 1.0, prompt: tuple[int, ...] = (1, 2)
) -> Sample:
    (sample,) = merge_calls([make_call("c", prompt, sampled, episode=episode)])
    return replace(sample, reward=reward, task="t")


@given(conversations())
def test_labels_are_the_sampled_tokens_and_nothing_else(calls: list) -> None:  # type: ignore[type-arg]
    for sample in merge_calls(calls):
        row = sft_row(sample)
        assert row["input_ids"] == list(sample.token_ids)
        learnt = [label for label in row["labels"] if label != NO_LABEL]
        assert learnt == [token for token, bit in zip(sample.token_ids, sample.loss_mask, strict=True) if bit]
        assert (row["sample"], row["reward"]) == (sample.sample, None)
        assert not any(sample.loss_mask[: prompt_length(sample)])


def test_what_nobody_rewarded_has_no_place_and_what_sampled_nothing_is_all_prompt() -> None:
    assert place(sample_of(3, reward=None), 0) is None
    assert prompt_length(sample_of()) == 2
    assert prompt_length(sample_of(3)) == 2


def test_only_samples_of_one_prompt_are_compared() -> None:
    one, two = place(sample_of(3), 0), place(sample_of(4), 1)
    other = place(sample_of(3, prompt=(1, 9)), 0)
    assert one is not None and two is not None and other is not None
    assert one.kind == two.kind != other.kind
    assert (two.episode, two.number, two.reward) == ("e", 1, 1.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from("ab")), max_size=9))
def test_pairs_go_from_the_outside_inwards(rewarded: list[tuple[float, str]]) -> None:
    places = [
        Place(str(index), 0, reward, (kind, "", "", ""), f"answer-{index}")
        for index, (reward, kind) in enumerate(rewarded)
    ]
    found = list(pairs(places))
    assert all(better.reward > worse.reward and better.kind == worse.kind for better, worse in found)
    used = [known for pair in found for known in pair]
    assert len(used) == len(set(used))
    for kind in "ab":
        rewards = sorted(reward for reward, of in rewarded if of == kind)
        expected = sum(low < high for low, high in zip(rewards, reversed(rewards), strict=True))
        assert sum(better.kind[0] == kind for better, _ in found) == expected


def test_the_same_answer_is_not_better_than_itself() -> None:
    good, bad, other = sample_of(3, episode="a"), sample_of(3, episode="b", reward=0.0), sample_of(4, episode="c")
    places = [known for sample in (good, bad) if (known := place(sample, 0)) is not None]
    assert list(pairs(places)) == []
    middle = place(other, 0)
    assert middle is not None
    assert list(pairs([*places, middle._replace(reward=0.5)])) == [(middle._replace(reward=0.5), places[1])]


def test_what_rounding_left_of_a_sum_is_not_better() -> None:
    one, other = sample_of(3, episode="a", reward=0.1 + 0.1 + 0.1), sample_of(4, episode="b", reward=0.3)
    large, small, off = (1e6, 0.3, -1e6), (0.3,), 1e6 + 0.3 - 1e6
    for rewards, told, number in (
        ((one.reward, other.reward), ((0.1, 0.1, 0.1), (0.3,)), 0), ((0.3, off), (small, large), 0),
        ((0.3, off), (small, small), 1),
    ):
        places = [
            known for sample, reward, values in zip((one, other), rewards, told, strict=True)
            if (known := place(replace(sample, reward=reward), 0, values)) is not None
        ]
        assert len(list(pairs(places))) == number


def test_a_pair_is_a_prompt_and_two_answers() -> None:
    good, bad = sample_of(3, 4, episode="good"), sample_of(5, episode="bad", reward=0.0)
    assert preference_row(good, bad) == {
        "sample": "good/0", "task": "t", "model": "m", "agent": "", "rejected_sample": "bad/0", "prompt_ids": [1, 2],
        "chosen_ids": [3, 4], "chosen_mask": [1, 1], "chosen_reward": 1.0, "rejected_ids": [5], "rejected_mask": [1],
        "rejected_reward": 0.0,
    }
