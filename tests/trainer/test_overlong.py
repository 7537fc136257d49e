"""Calls that ran into their limit: what their length costs, and what of them is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ajet_sdk.sample import BatchEpisode, Group, Sample
from ajet_trainer.admission import admit
from ajet_trainer.advantage import compared
from ajet_trainer.batch import to_rows
from ajet_trainer.overlong import Shaping, ends, punished
from ajet_trainer.sampling import Rule, treat
from ajet_trainer.turns import ByTurn, credit, turn_sessions
from tests.trainer.making import PROCESSED, batch, episode, sample
from tests.trainer.test_turns import played

MASK = Rule(overlong=True)
SHAPING = Shaping(limit=10, buffer=4, factor=0.5)


@pytest.mark.parametrize(
    ("sampled", "reason", "penalty"),
    [
        (0, "stop", 0.0), (6, "stop", 0.0), (7, "stop", -0.125), (8, "stop", -0.25), (10, "stop", -0.5),
        (11, "stop", -0.5), (3, "length", -0.5), (10, "length", -0.5),
    ],
)  # fmt: skip
def test_the_punishment_grows_with_the_length(sampled: int, reason: str | None, penalty: float) -> None:
    assert SHAPING.penalty(sampled, reason) == penalty


def ended(one: BatchEpisode, *reasons: str) -> BatchEpisode:
    """`one` with the finish reasons of the calls of its samples, each of which has one call for each reason."""
    return replace(one, samples=tuple(replace(part, finish_reasons=reasons) for part in one.samples))


def test_an_episode_is_punished_for_its_longest_call() -> None:
    one = replace(ended(episode("e", 1.0, turns=2, sampled=8), "stop", "length"), reward=1.0)
    (part,) = one.samples
    both = replace(one, samples=(replace(part, reward=1.0), replace(sample("e/1"), reward=None)))
    made, penalty = punished(both, SHAPING, by_turn=False)
    assert (made.reward, penalty, [part.reward for part in made.samples]) == (0.5, -0.5, [0.5, None])
    assert punished(ended(one, "stop", "stop"), SHAPING, by_turn=False)[1] == -0.25


def test_by_turn_each_call_is_punished_for_its_own_length() -> None:
    one = ended(played("e", [0, 1], sampled=8), "stop", "length")
    made, penalty = punished(one, SHAPING, by_turn=True)
    given = [(item["call"], item["value"]) for item in made.rewards[len(one.rewards) :]]
    assert (given, penalty) == ([("e/0/c0", -0.25), ("e/0/c1", -0.5)], -0.75)
    assert made.reward == one.reward


def test_the_punishment_is_in_what_is_compared_and_in_no_figure_of_what_was_given() -> None:
    long, short = episode("a", 1.0, sampled=9), episode("b", 1.0)
    leased = batch("b", Group("t", (long, short)))
    admission = admit(leased, Rule(shaping=SHAPING, no_signal="drop"))
    ((one, other),) = compared(admission.groups[0])
    assert (one.reward, other.reward) == (0.625, 1.0)
    assert admission.penalties == {"a": -0.375, "b": 0.0}
    assert admit(leased).penalties == {"a": 0.0, "b": 0.0}
    one, other = played("a", [1.0], sampled=9), played("b", [1.0])
    by_turn = admit(batch("b", Group("t", (one, other))), Rule(shaping=SHAPING, by_turn=ByTurn()))
    assert [row.reward for row in to_rows("b", by_turn.groups, by_turn=ByTurn())] == [0.625, 1.0]


def test_overlong_calls_are_left_out_and_counted() -> None:
    one = ended(episode("a", 1.0, turns=2), "length", "stop")
    admission = admit(batch("b", Group("t", (one, ended(episode("b", 0.0), "stop")))), rule=MASK)
    assert admission.left_out == {"overlong": 1}
    first, _ = to_rows("b", admission.groups)
    assert [call for call, _, _ in first.spans] == ["a/0/c1"]
    assert admit(batch("b", Group("t", (one,)))).left_out == {}


def test_what_is_overlong_as_a_whole_still_counts_in_the_baseline() -> None:
    """It has a row of two tokens without a mask."""
    one = ended(episode("a", 1.0, samples=2), "length")
    for strict in (MASK, Rule("strict", overlong=True)):
        admission = admit(batch("b", Group("t", (one, ended(episode("b", 0.0), "stop")))), rule=strict)
        assert (admission.rejected, admission.left_out) == ((), {"overlong": 2})
        silent, row = to_rows("b", admission.groups)
        assert (silent.sampled, silent.tokens, silent.reward, silent.spans) == (0, 2, 1.0, ())
        assert (silent.group, silent.session, silent.min_version) == (row.group, 0, 0)
        assert (row.session, row.sampled) == (1, 3)


def test_by_turn_a_call_that_is_left_out_counts_for_those_before_it() -> None:
    """Also where it is alone in its sample."""
    late = replace(sample("a/1"), reward=1.0, finish_reasons=("length",), turns=(1,))
    early = replace(sample("a/0"), reward=0.0, turns=(0,))
    one = BatchEpisode("a", "t", "m", 1.0, ({"value": 1.0, "call": late.calls[0]},), (early, late))
    other = ended(played("b", [0, 0]), "stop", "stop")
    how = ByTurn(scaled=False)
    for rule in (MASK, Rule()):
        admission = admit(batch("b", Group("t", (one, other))), replace(rule, by_turn=how))
        rows = to_rows("b", admission.groups, by_turn=how)
        kept = {call: float(row.advantages[start]) for row in rows if row.advantages is not None
                for call, start, _ in row.spans}  # fmt: skip
        masked = {"a/1/c0"} if rule is MASK else set()
        assert kept == {call: value for call, value in {
            "a/0/c0": 0.5, "a/1/c0": 0.5, "b/0/c0": -0.5, "b/0/c1": -0.5}.items() if call not in masked}  # fmt: skip


def test_a_group_of_nothing_else_is_refused() -> None:
    group = Group("t", tuple(ended(episode(name, value), "length") for name, value in (("a", 1.0), ("b", 0.0))))
    admission = admit(batch("b", group), MASK)
    assert admission.groups == ()
    assert {(one.reason, one.detail) for one in admission.rejected} == {
        ("sampling", "every call of task t that was rewarded is left out")
    }


def test_by_turn_a_punishment_leaves_the_sessions_as_agents_rewarded_them() -> None:
    """Episode a is of three agents, and one call of it is a little too long."""
    one = of_agents(episode("a", 1.0, samples=3), "xyz")
    others = [of_agents(episode(name, 0.0, sampled=2), "x") for name in "bc"]
    light, how = Shaping(limit=4, buffer=2, factor=0.002), ByTurn(scaled=False)
    admission = admit(batch("b", Group("t", (one, *others))), Rule(shaping=light, by_turn=how))
    assert list(admission.penalties.values()) == pytest.approx([-0.003, 0, 0])
    rows = to_rows("b", admission.groups, by_turn=how)
    assert len({(row.group, row.session) for row in rows}) == 3
    found = [float(row.advantages[row.spans[0][1]]) for row in rows if row.advantages is not None]
    assert found == pytest.approx([2 / 3] * 3 + [-1 / 3] * 2, abs=0.003)
    assert found[0] < 2 / 3 and rows[0].reward == pytest.approx(0.997)


def test_by_turn_the_order_of_agents_calls_is_not_that_of_their_samples() -> None:
    """A merge into other timelines puts samples into another order."""
    one, other = (of_agents(episode(name, samples=2), "xy") for name in "ab")
    long = replace(one, samples=(replace(one.samples[0], finish_reasons=("length",)), one.samples[1]))
    how = ByTurn(scaled=False)
    for first in (long, replace(long, samples=long.samples[::-1])):
        admission = admit(batch("b", Group("t", (first, other))), Rule(shaping=SHAPING, by_turn=how))
        (mine, _) = credit(turn_sessions(admission.groups[0])[0], how)
        assert mine == {"a/0/c0": -0.25, "a/1/c0": 0.0}


def of_agents(one: BatchEpisode, agents: str, *rewards: float) -> BatchEpisode:
    """`one` with a sample for each of the `agents`, and their `rewards` if they got any of their own."""
    samples = [replace(part, agent=agent, turns=(0,)) for part, agent in zip(one.samples, agents, strict=True)]
    if not rewards:
        return replace(one, samples=tuple(samples))
    given = tuple({"value": value, "agent": agent} for value, agent in zip(rewards, agents, strict=True))
    samples = [replace(part, reward=value) for part, value in zip(samples, rewards, strict=True)]
    return replace(one, samples=tuple(samples), rewards=given)


@pytest.mark.parametrize("cause", ["greedy", "overlong"])
def test_by_turn_an_agent_whose_calls_are_all_left_out_still_counts(cause: str) -> None:
    """Whatever the reason, its reward is in the baseline of the others."""
    how = ByTurn(scaled=False)

    def advantages(*left_out: str) -> dict[str, float]:
        values = {"a": 3.0, "b": 0.0, "c": 1.0}
        told = [of_agents(episode(name, samples=2), "xy", 1.0, value) for name, value in values.items()]
        samples = [replace(part, finish_reasons=("length",)) if cause == "overlong" and part.sample in left_out
                   else replace(part, sampling=((PROCESSED | {"temperature": 0}, 3),)) if part.sample in left_out
                   else part for part in told[0].samples]  # fmt: skip
        group = Group("t", (replace(told[0], samples=tuple(samples)), *told[1:]))
        admission = admit(batch("b", group), replace(MASK, by_turn=how))
        assert admission.left_out.total() == len(left_out)
        return {row.spans[0][0]: float(row.advantages[-1]) for row in to_rows("b", admission.groups, by_turn=how)
                if row.advantages is not None and row.spans}  # fmt: skip

    whole = advantages()
    assert {call: whole[call] for call in ("b/1/c0", "c/1/c0")} == pytest.approx({"b/1/c0": -4 / 3, "c/1/c0": -1 / 3})
    assert advantages("a/1") == {call: value for call, value in whole.items() if call != "a/1/c0"}


def test_by_turn_an_episode_without_a_call_that_was_sampled_is_refused() -> None:
    greedy = PROCESSED | {"temperature": 0}
    one = episode("a", 1.0, facts=(greedy,))
    admission = admit(batch("b", Group("t", (one, episode("b"), episode("c")))), Rule(by_turn=ByTurn()))
    assert [(rejection.episode, rejection.reason) for rejection in admission.rejected] == [("a", "sampling")]


def test_how_the_calls_of_a_sample_ended_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chat is one sample with thousands of calls."""
    read = list[str]()

    def counted(one: Sample) -> Mapping[str, str]:
        read.append(one.sample)
        return ends(one)

    monkeypatch.setattr("ajet_trainer.overlong.ends", counted)
    monkeypatch.setattr("ajet_trainer.sampling.ends", counted)
    long = episode("e", turns=20)
    punished(long, SHAPING, by_turn=False)
    treat(long, MASK)
    assert read == ["e/0", "e/0"]
