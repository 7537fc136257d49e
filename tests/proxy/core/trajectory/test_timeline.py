"""The laws of merging (contract §6.3), each against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import structs

from ajet_proxy.core.tokens import unpack_tokens
from ajet_proxy.core.trajectory.timeline import Policy, Timeline, merge, merge_packed, pack
from ajet_sdk.sample import Call
from tests.kit.steps import is_within
from tests.kit.strategies import conversations, make_call, tangled_calls


def prompt(call: Call) -> tuple[int, ...]:
    return call.prompt_token_ids


def end(call: Call) -> tuple[int, ...]:
    return call.prompt_token_ids + call.token_ids


def can_follow(before: Call, after: Call) -> bool:
    """Tell whether one timeline may hold `after` behind `before`, by the laws alone."""
    if (before.model, before.agent) != (after.model, after.agent) or prompt(after)[: len(end(before))] != end(before):
        return False
    if end(before) == prompt(before) == prompt(after) == end(after):
        return (before.started_at, before.call) < (after.started_at, after.call)
    return before is not after


def fewest(calls: Sequence[Call]) -> int:
    """The least number of chains that hold all calls: calls less a maximum matching, by augmenting paths."""
    behind: dict[int, int] = {}

    def augment(after: int, tried: set[int]) -> bool:
        for before in range(len(calls)):
            if before in tried or not can_follow(calls[before], calls[after]):
                continue
            tried.add(before)
            if before not in behind or augment(behind[before], tried):
                behind[before] = after
                return True
        return False

    return len(calls) - sum(augment(after, set()) for after in range(len(calls)))


def one_by_one(calls: Sequence[Call]) -> list[list[str]]:
    """Law 5 taken at its word: in the order of their start, each call extends the longest timeline that it can."""
    chains: list[list[Call]] = []
    for call in sorted(calls, key=lambda call: (call.started_at, call.call)):
        open_ends = [chain for chain in chains if can_follow(chain[-1], call)]
        if open_ends:
            max(open_ends, key=lambda chain: len(end(chain[-1]))).append(call)
        else:
            chains.append([call])
    return [[call.call for call in chain] for chain in chains]


def chains_of(timelines: Sequence[Timeline]) -> list[list[str]]:
    return [[turn.call for turn in timeline.turns] for timeline in timelines]


@given(tangled_calls())
def test_every_call_stands_in_one_timeline_as_a_prefix(calls: list[Call]) -> None:
    by_name = {call.call: call for call in calls}
    timelines = merge(calls)
    assert sorted(name for chain in chains_of(timelines) for name in chain) == sorted(by_name)
    for timeline in timelines:
        tokens = unpack_tokens(timeline.tokens)
        position = 0
        for turn in timeline.turns:
            call = by_name[turn.call]
            assert tokens[: turn.end] == end(call)
            assert position <= turn.start == len(prompt(call))
            assert (call.model, call.agent) == (timeline.model, timeline.agent)
            position = turn.end
        assert position == len(tokens) == len(timeline)


@given(tangled_calls())
@example([make_call("a", [1], [2]), make_call("b", [1, 2], [3]), make_call("z", [1, 2], [])])
@example([make_call("b", [1, 2], [3]), make_call("y", [1, 2], [], at=1), make_call("z", [1, 2], [], at=2)])
@example([make_call("a", [1], [2, 3]), make_call("b", [1, 2], [3]), make_call("c", [1, 2, 3], [4])])
def test_no_fewer_timelines_are_possible(calls: list[Call]) -> None:
    assert len(merge(calls)) == fewest(calls)


@given(tangled_calls(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(calls: list[Call], dice: random.Random) -> None:
    expected = merge(calls)
    dice.shuffle(calls)
    assert merge(calls) == expected


@given(conversations())
def test_in_order_of_their_start_each_call_extends_the_longest_timeline(calls: list[Call]) -> None:
    """Where no call is, by chance, a continuation of a later one."""
    assume(not any(can_follow(calls[j], calls[i]) for j in range(len(calls)) for i in range(j)))
    assert sorted(chains_of(merge(calls))) == sorted(one_by_one(calls))


@given(tangled_calls())
def test_every_call_can_be_read_back(calls: list[Call]) -> None:
    back = [turn.to_call(line.tokens, "ep") for line in merge(calls) for turn in line.turns]
    assert sorted(back, key=lambda call: call.call) == sorted(calls, key=lambda call: call.call)
    assert [turn.summary("ep") for line in merge(calls) for turn in line.turns] == [
        counted(call) for call in back
    ]


def counted(call: Call) -> dict[str, Any]:
    """The JSON object of `call`, with counts instead of ids and logprobs."""
    line = call.to_json()
    prompt, sampled, _ = (line.pop(name) for name in ("prompt_token_ids", "token_ids", "logprobs"))
    return line | {"prompt_tokens": len(prompt), "sampled_tokens": len(sampled)}


@given(tangled_calls())
def test_off_keeps_every_call_apart(calls: list[Call]) -> None:
    timelines = merge(calls, "off")
    ordered = sorted(calls, key=lambda call: (call.started_at, call.call))
    assert chains_of(timelines) == [[call.call] for call in ordered]
    assert [unpack_tokens(timeline.tokens) for timeline in timelines] == [end(call) for call in ordered]


@given(tangled_calls())
def test_timelines_stand_in_the_order_of_their_first_calls(calls: list[Call]) -> None:
    ranks = [line.turns[0].rank for line in merge(calls)]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(("calls", "chains"), [
    ([("a", [1], [2], 0), ("b", [1], [2], 1), ("c", [1, 2, 5], [6], 2)], [["a", "c"], ["b"]]),
    ([("z", [1], [2], 0), ("a", [1], [2], 1), ("c", [1, 2, 5], [6], 2)], [["z", "c"], ["a"]]),
    ([("b", [1], [2], 0), ("a", [1], [2], 0), ("c", [1, 2, 5], [6], 0)], [["a", "c"], ["b"]]),
    ([("a", [1], [2, 3, 4], 0), ("b", [1, 2, 3], [9], 1)], [["a"], ["b"]]),
    ([("a", [1], [], 0), ("b", [1], [2], 1), ("c", [1, 2], [], 2)], [["a", "b", "c"]]),
    ([("a", [1], [2], 9), ("b", [1, 2, 3], [4], 1)], [["a", "b"]]), ([], []),
], ids=[
    "one prompt", "equal ends", "equal times", "a prompt within sampled tokens", "nothing sampled", "clocks", "no calls"
])  # fmt: skip
def test_which_call_goes_on_from_which(calls: list[Any], chains: list[list[str]]) -> None:
    made = [make_call(name, prompt, sampled, at=at) for name, prompt, sampled, at in calls]
    assert chains_of(merge(made)) == chains


def test_models_and_agents_stay_apart() -> None:
    calls = [
        make_call("a", [1], [2], at=0), make_call("b", [1, 2, 3], [4], at=1, model="other"),
        make_call("c", [1, 2, 3], [4], at=2, agent="other"), make_call("d", [1, 2, 3], [4], at=3),
    ]
    assert chains_of(merge(calls)) == [["a", "d"], ["b"], ["c"]]


def test_a_fork_takes_over_what_others_sampled_of_its_prompt() -> None:
    """The last call is nearest to the second fork, which sampled nothing of the answer that the call has otherwise."""
    answer = list(range(10, 22))
    calls = [
        make_call("a", [1, 2, 3], answer, at=0),
        make_call("silent", [1, 2, 3, *answer], [], at=1),
        make_call("longer", [1, 2, 3, *answer, 30], [], at=2),
        make_call("fork1", [1, 2, 3, *answer, 30, 31], [5, 21], at=3),
        make_call("fork2", [1, 2, 3, *answer, 30, 32], [5, 21], at=4),
        make_call("drifted", [1, 2, 3, *answer[:4], 40, *answer[5:], 30], [5, 21], at=5),
    ]
    assert [line.broken_by for line in merge(calls)] == [None, "parallel", "retokenized"]


@pytest.mark.parametrize("wrong", [{"start": -1}, {"start": 4}, {"end": 4}, {"logprobs": bytes(7)}, {}])
def test_a_packed_call_is_as_long_as_its_turn_says(wrong: dict[str, object]) -> None:
    packed = pack(make_call("a", (1, 2), (3,)))
    assert (packed.prompt_token_ids, packed.turn.sampled) == ((1, 2), 1)
    assert structs.replace(packed, turn=structs.replace(packed.turn, **wrong)).is_whole == (not wrong)
    assert not structs.replace(packed, text=packed.text[1:]).is_whole


@pytest.mark.parametrize("shape", ["chain", "fork", "silent", "dropped", "retold"])
def test_cost_grows_with_the_calls_and_not_with_their_square(shape: str) -> None:
    """Sixteen times the calls, each as long as before, within sixty times the time."""

    def calls(count: int) -> list[Call]:
        history = list(range(2000))
        if shape == "dropped":
            return [make_call(f"{n:05d}", [*history, *range(n)], [1], at=n) for n in range(count)]
        if shape == "retold":
            return [make_call(f"{n:05d}", [*history, *[1, 2] * n], [1, 3, 2], at=n) for n in range(count)]
        if shape == "chain":
            return [make_call(f"{n:05d}", history[: 1000 + n // 4 * 2], [n % 4, 1], at=n) for n in range(count)]
        sampled = [] if shape == "silent" else [1]
        return [make_call(f"{n:05d}", [*history, n], sampled, at=n) for n in range(count)]

    def merging(count: int) -> Callable[[], object]:
        packed = [pack(call) for call in calls(count)]
        random.Random(0).shuffle(packed)
        return lambda: merge_packed(packed)

    assert is_within(60, merging(100), merging(1600))


@pytest.mark.parametrize(("policy", "kept"), [("strict", None), ("repair", ("a", 2)), ("off", None)])
def test_what_is_known_of_texts_is_kept_where_it_counts(policy: Policy, kept: tuple[str, int] | None) -> None:
    calls = [make_call("a", (1,), (2,), at=1.0), replace(make_call("b", (1, 3), (4,), at=2.0), same_text=("a", 2))]
    assert [timeline.turns[0].same_text for timeline in merge(calls, policy)] == [None, kept]
    (_, second) = merge(calls, "repair")
    assert second.turns[0].summary("ep")["same_text"] == ["a", 2]
    assert second.turns[0].to_call(second.tokens, calls[1].episode) == calls[1]


def test_how_calls_were_sampled_is_in_memory_once() -> None:
    one, two = (pack(make_call(name, (1,), (2,), sampling={"top_p": 0.5, "logprobs": "raw"})).turn for name in "ab")
    assert one.sampling is two.sampling
    assert one.sampling == '{"logprobs":"raw","top_p":0.5}'
    assert one.summary("e")["sampling"] == {"logprobs": "raw", "top_p": 0.5}
    assert "sampling" not in pack(make_call("c", (1,), (2,))).turn.summary("e")
