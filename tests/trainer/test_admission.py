from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ajet_sdk.sample import BatchEpisode, Group, Sample
from ajet_trainer.admission import TOLD, Admission, Rejection, admit, episode_fault, sample_faults
from ajet_trainer.advantage import compared
from ajet_trainer.batch import to_rows
from ajet_trainer.sampling import Rule
from tests.trainer.making import PROCESSED, batch, duel, episode, sample

GOOD = sample("e/0", turns=2)


def broken(**changes: object) -> Sample:
    return replace(GOOD, **changes)  # type: ignore[arg-type]


def changed(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (broken(loss_mask=tuple(2 * bit for bit in GOOD.loss_mask)), "other than 0 and 1"),
        (broken(loss_mask=(1, *GOOD.loss_mask[1:])), "from no prompt"),
        (broken(token_ids=(*GOOD.token_ids[:3], -1, *GOOD.token_ids[4:])), "token -1 at 3"),
        (broken(logprobs=changed(GOOD.logprobs, 5, math.nan)), "logprob nan at token 5"),
        (broken(logprobs=changed(GOOD.logprobs, 5, -math.inf)), "logprob -inf"),
        (broken(logprobs=changed(GOOD.logprobs, 5, 0.5)), "logprob 0.5"),
        (broken(logprobs=changed(GOOD.logprobs, 0, -0.1)), "with mask 0"),
        (broken(policy_versions=((0, 5),)), "policy versions"),
        (broken(spans=(("e/0/c0", 4, 7), ("e/0/c1", 6, 12))), "overlaps"),
        (broken(spans=(("e/0/c0", 4, 7), ("other", 9, 12))), "outside the sample"),
        (broken(spans=(("e/0/c0", 4, 7), ("e/0/c1", 9, 99))), "outside the sample"),
        (broken(spans=(("e/0/c0", 4, 7),)), "not the tokens of the loss mask"),
        (broken(sampling=((PROCESSED, 5),)), "sampling do not add up to the 6"),
        (broken(sampling=((PROCESSED, 4), (None, 2))), "change within a call"),
    ],
)
def test_every_broken_law_is_named(bad: Sample, words: str) -> None:
    assert not list(sample_faults(GOOD))
    assert words in next(iter(sample_faults(bad)))
    fault = episode_fault(BatchEpisode("e", "t", "policy", 1.0, (), (GOOD, bad)))
    assert fault is not None
    assert fault[0] == "unlawful_sample"


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    """It would end the process that looks up its embedding. Of the prompt, too."""
    for place in (0, 5):
        ids = (*GOOD.token_ids[:place], 300, *GOOD.token_ids[place + 1 :])
        odd = BatchEpisode("e", "t", "policy", 1.0, (), (broken(token_ids=ids),))
        fine = replace(episode("f"), samples=(replace(sample("f/0"), token_ids=(299,) * 7),))
        found = admit(batch("b", Group("t", (odd, fine, episode("g")))), Rule(vocabulary=300))
        why = f"e/0: token 300 at {place} is beyond the model's 300"
        assert [(one.reason, one.detail) for one in found.rejected] == [("unlawful_sample", why)]
        assert [one.episode for one in found.episodes] == ["f", "g"]
    assert not admit(batch("b", Group("t", (odd, fine)))).rejected


def test_a_call_may_stand_in_one_sample_only() -> None:
    double = BatchEpisode("e", "t", "policy", 1.0, (), (GOOD, replace(GOOD, sample="e/1")))
    fault = episode_fault(double)
    assert fault == ("unlawful_sample", "e/1: call e/0/c0 is in two samples")


SILENT = broken(
    sample="e/1", loss_mask=(0,) * 12, logprobs=(0.0,) * 12, calls=("quiet",), spans=(("quiet", 12, 12),),
    policy_versions=(), sampling=(),
)


def test_an_episode_that_comes_twice_and_calls_of_two_episodes_are_refused() -> None:
    one, other, third = episode("e", 0.0), episode("f", 1.0), episode("g", 1.0)
    stolen = replace(third, samples=(replace(other.samples[0], sample="g/0", episode="g"),))
    good = Group("t", (episode("h", 0.0), episode("i", 1.0)))
    admission = admit(batch("b", Group("t", (one, one)), Group("t", (other, stolen)), good))
    assert [found.episode for found in admission.episodes] == ["h", "i"]
    assert admission.filtered == {
        "e": "unlawful_sample: e is in the batch twice",
        **dict.fromkeys("fg", f"unlawful_sample: {other.samples[0].calls[0]} is in the batch twice"),
    }


def test_what_sampled_nothing_is_lawful_and_teaches_nothing() -> None:
    assert not list(sample_faults(SILENT))
    assert episode_fault(BatchEpisode("e", "t", "policy", 1.0, (), (GOOD, SILENT))) is None
    alone = BatchEpisode("e", "t", "policy", 1.0, (), (SILENT,))
    assert episode_fault(alone) == ("no_samples", "nothing was sampled in what was rewarded")


def test_a_reward_for_what_is_in_no_sample_trains_nothing() -> None:
    lost = BatchEpisode("e", "t", "policy", 1.0, ({"value": 1.0, "call": "lost"},), (GOOD,))
    assert episode_fault(lost) == ("no_samples", "nothing was sampled in what was rewarded")


def test_agents_that_share_out_a_sum_of_zero_have_a_signal() -> None:
    group = Group("t", (duel("a", 1.0), duel("b", -1.0)))
    assert len(admit(batch("b", group), Rule(no_signal="drop")).episodes) == 2
    flat = Group("t", (duel("a", 1.0), duel("b", 1.0)))
    assert admit(batch("b", flat), Rule(no_signal="drop")).episodes == ()


def test_other_reasons_for_refusal() -> None:
    assert episode_fault(episode("e"), {"e"}) == ("already_trained", "part of the checkpointed history")
    assert (episode_fault(replace(episode("e"), reward=math.inf)) or ("",))[0] == "bad_reward"
    assert (episode_fault(replace(episode("e"), samples=())) or ("",))[0] == "no_samples"
    assert (episode_fault(episode("e", turns=2), rule=Rule(max_tokens=11)) or ("",))[0] == "too_long"
    assert episode_fault(episode("e", turns=2), rule=Rule(max_tokens=12)) is None


def test_an_episode_with_one_token_that_is_too_old_is_refused() -> None:
    mixed = replace(episode("e"), samples=(replace(sample("e/0"), policy_versions=((3, 1), (5, 2))),))
    assert episode_fault(mixed, rule=Rule(oldest=4)) == ("stale", "e/0: tokens of version 3, older than 4")
    assert episode_fault(mixed, rule=Rule(oldest=3)) is episode_fault(mixed) is None
    silent = BatchEpisode("e", "t", "policy", 1.0, (), (GOOD, SILENT))
    assert episode_fault(silent, rule=Rule(oldest=0)) is None


def test_an_episode_that_is_alone_has_no_baseline_where_episodes_are_compared() -> None:
    pair = Group("t", (episode("good"), replace(episode("bad"), samples=())))
    late = replace(pair, task="w", episodes=(episode("late"),), earlier=(episode("first"),))
    groups = pair, Group("u", (episode("single"),)), late
    admission = admit(batch("b", *groups))
    assert [group.task for group in admission.groups] == ["w"]
    assert admission.filtered == {
        "bad": "no_samples: an episode without a complete call", "good": "no_baseline: alone in the group of task t",
        "single": "no_baseline: alone in the group of task u",
    }  # fmt: skip
    assert [group.task for group in admit(batch("b", *groups), Rule(compares=False)).groups] == ["t", "u", "w"]


def test_one_that_is_compared_alone_may_have_a_call_of_one_token_that_sampled_nothing() -> None:
    lone = replace(SILENT, token_ids=SILENT.token_ids[:1], loss_mask=(0,), logprobs=(0.0,), spans=(("c", 1, 1),))
    first = episode("first")
    earlier = replace(first, samples=(*first.samples, replace(lone, sample="first/1", episode="first", calls=("c",))))
    admission = admit(batch("b", Group("t", (episode("late"),), earlier=(earlier,))))
    (group,) = admission.groups
    assert [one.loss_mask for one in group.earlier[0].samples][-1] == (0,)


def test_the_proxy_is_told_why_in_a_few_words() -> None:
    alone = Rejection("e", "no_baseline", "alone in the group of task " + "t" * 1000)
    told = Admission((), (alone, replace(alone, episode="f", detail="d"))).filtered
    assert len(told["e"]) == TOLD and told["e"].startswith("no_baseline: alone in") and told["e"].endswith("t…")
    assert told["f"] == "no_baseline: d"


def test_what_is_trained_already_is_refused_and_not_filtered() -> None:
    admission = admit(batch("b", Group("t", (episode("old"),))), trained={"old"})
    assert [rejection.episode for rejection in admission.rejected] == ["old"]
    assert admission.filtered == {}


def test_groups_without_signal_are_kept_or_dropped_as_told() -> None:
    flat, steep = (Group(f"t{n}", (episode(f"a{n}", 0.0), episode(f"b{n}", float(n)))) for n in range(2))
    assert len(admit(batch("b", flat, steep)).groups) == 2
    admission = admit(batch("b", flat, steep), Rule(no_signal="drop"))
    assert [group.task for group in admission.groups] == ["t1"]
    assert {rejection.reason for rejection in admission.rejected} == {"no_signal"}


GREEDY = {"logprobs": "processed", "temperature": 0}


def test_an_episode_of_which_nothing_is_left_is_refused_by_name() -> None:
    group = Group("t", (episode("a", facts=(GREEDY,)), episode("b"), episode("c", 0.0)))
    admission = admit(batch("b", group))
    assert [one.episode for one in admission.episodes] == ["b", "c"]
    assert admission.filtered["a"].startswith("sampling: every call that was rewarded is left out: greedy (nothing was")
    refused = admit(batch("b", group), Rule("strict")).filtered["a"]
    assert refused.startswith("sampling: call a/0/c0: greedy (")


def test_those_that_were_trained_before_are_compared_and_not_trained() -> None:
    """A late member of a group, which alone has no baseline. Their own faults are nobody's."""
    late, before, broken_one = episode("late", 0.9), episode("before", 0.1), replace(episode("bad", 9.0), samples=())
    admission = admit(batch("b", Group("t", (late,), (before, broken_one))), trained={"before"})
    assert [one.episode for one in admission.episodes] == ["late"]
    assert not admission.rejected
    (sessions,) = compared(admission.groups[0])
    assert [session.reward for session in sessions] == [0.9, 0.1]
    rows = to_rows("b", admission.groups)
    assert [(row.reward, row.sampled > 0) for row in rows if row.episode == "before"] == [(0.1, False)]
    alone = admit(batch("b", Group("t", (episode("bad", math.nan), late), ())))
    assert {one.reason for one in alone.rejected} == {"bad_reward", "no_baseline"}


def test_without_a_signal_those_of_before_count_too() -> None:
    group = Group("t", (episode("late", 0.9),), (episode("before", 0.9),))
    assert [one.reason for one in admit(batch("b", group), Rule(no_signal="drop")).rejected] == ["no_signal"]
    assert not admit(batch("b", replace(group, earlier=(episode("before", 0.1),))), Rule(no_signal="drop")).rejected
