"""The bound of a frame's length before there is a frame, against the frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import leases, views
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.leases import leading, most_bytes, too_large
from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_proxy.core.trajectory.timeline import pack
from ajet_sdk.frame import MAX_FRAME_BYTES, MAX_TOKENS, encode_batch
from ajet_sdk.sample import Call
from tests.kit.ledger_rig import LedgerRig
from tests.kit.strategies import conversations, make_call, tangled_calls

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def whole(rig: LedgerRig, calls: list[Call], task: str, note: str, dice: Random | None = None) -> str:
    """An episode of `calls` that is rewarded more than once, in words of any language. With `dice`, some say that they
    go on from the text of an earlier one."""
    episode, names = rig.open(task=task), list[str]()
    for call in calls:
        (name,) = rig.begin(episode, model=call.model, agent=call.agent)
        if dice and names and call.prompt_token_ids and dice.random() < 0.7:
            call = replace(call, same_text=(dice.choice(names), dice.randint(1, len(call.prompt_token_ids))))
        rig.run(rig.commands.finish_call(episode, pack(replace(call, call=name)), at=rig.at))
        names.append(name)
    rig.reward(episode, -0.1, note=note, agent=note, final=False)
    rig.reward(episode, 1e12)
    return episode


@given(st.lists(st.one_of(tangled_calls(), conversations()), min_size=1, max_size=3), names, names,
       st.sampled_from(["strict", "repair", "off"]), st.randoms(use_true_random=False))  # fmt: skip
def test_no_frame_is_larger_than_was_said(
    made: list[list[Call]], task: str, note: str, policy: str, dice: Random
) -> None:
    rig = LedgerRig(LedgerSettings(group_size=1, merge_policy=policy))
    rig.restart()
    episodes = [whole(rig, calls, task, note, dice) for calls in made]
    ready = sum(rig.state_of(episode) == "ready" for episode in episodes)
    for model in ("m", "n"):
        batch = next((b for n in range(ready, 0, -1) if (b := rig.lease(groups=n, model=model))), None)
        if batch is not None:
            taken = [name for _, (name,) in rig.state.batches[batch].groups]
            said = sum(most_bytes(rig.state.episodes[name], model) for name in taken)
            there = views.batch(rig.state, batch)
            assert len(encode_batch(there)) <= said
            samples = [one for group in there.groups for episode in group.episodes for one in episode.samples]
            assert leases._LAID_OUT * sum(len(sample.token_ids) for sample in samples) <= said
            for name in taken:
                check_distinct(rig.state.episodes[name], model, policy)


def check_distinct(episode: Episode, model: str, policy: str) -> None:
    """Compares what is counted with what the samples' tree has; with `repair` no less."""
    texts = [sample.token_ids for sample in views.delivered(episode, model, None).samples]
    beginnings = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    known = episode.transcript
    counted = known.distinct([chain for chain in known.chains if chain.turns[0].model == model])
    assert counted >= len(beginnings) if policy == "repair" else counted == len(beginnings)


def rewards(rig: LedgerRig) -> str:
    episode = whole(rig, [make_call("c", (1,), (2,), agent="a")], "t", "n")
    for number in range(300):
        rig.reward(episode, 0.1, id=chr(200 + number), call="call-001", agent="a", note="", state="s")
    return episode


def samples(rig: LedgerRig) -> str:
    return whole(rig, [make_call("c", (number,), (1,)) for number in range(300)], "t", "n")


def turns(rig: LedgerRig) -> str:
    return whole(rig, [make_call("c", [0] * (2 * n + 1), (0,), version=2**31 - n) for n in range(1, 500)], "t", "n")


def sampled_otherwise(rig: LedgerRig) -> str:
    def how(n: int) -> dict[str, Any]:
        return {"logprobs": "raw", "top_p": 0.5, "logit_bias": {str(token): 0.5 for token in range(10)}, "seed": n}

    calls = [make_call("c", [0] * (2 * n + 1), (0,), sampling=how(n), finish="tool_calls") for n in range(1, 300)]
    return whole(rig, calls, "t", "n")


def versions(rig: LedgerRig) -> str:
    changing = [(2**31 - 1 - n % 2, 1) for n in range(20_000)]
    return whole(rig, [make_call("c", (1,), range(20_000), versions=changing)], "t", "n")


def words(rig: LedgerRig) -> str:
    return whole(rig, [make_call("c", (1,), (1,), agent="\U0001f40d" * 900)], "\U0001f40d" * 900, "\U0001f40d" * 900)


def tokens(rig: LedgerRig) -> str:
    return whole(rig, [make_call("c", range(2**31 - 20_000, 2**31), range(20_000))], "t", "n")


def forks(rig: LedgerRig) -> str:
    """A long history from which many go on; its tokens are sent once."""
    history = range(50_000)
    return whole(rig, [make_call("c", [*history, number], (1,) * 2000) for number in range(20)], "t", "n")


def prompts(rig: LedgerRig) -> str:
    return whole(rig, [make_call("c", range(2**31 - 50_000, 2**31), (1,))], "t", "n")


@pytest.mark.parametrize(
    ("make", "slack"), [(rewards, 2), (samples, 2.5), (turns, 2.1), (versions, 2), (words, 1.1), (tokens, 1.1),
                       (sampled_otherwise, 3), (prompts, 1.1)]
)
def test_each_part_of_a_frame_is_counted(make: Callable[[LedgerRig], str], slack: float) -> None:
    """Where a frame is made of one thing, what is said is enough, and not too much."""
    rig = LedgerRig(LedgerSettings(group_size=1))
    episode = make(rig)
    frame = len(encode_batch(views.batch(rig.state, rig.lease(model="m") or "")))
    assert frame <= most_bytes(rig.state.episodes[episode], "m") <= slack * frame


def test_what_timelines_share_is_sent_once_and_laid_out_in_each() -> None:
    rig = LedgerRig(LedgerSettings(group_size=1))
    episode = forks(rig)
    batch = views.batch(rig.state, rig.lease(model="m") or "")
    frame, said = len(encode_batch(batch)), most_bytes(rig.state.episodes[episode], "m")
    laid_out = sum(len(sample.token_ids) for group in batch.groups for sample in group.episodes[0].samples)
    assert (laid_out, said) == (20 * 52_001, 2 * 20 * 52_001)
    assert 4 * (50_000 + 20 * 2001) + 4 * 20 * 2000 < frame < said / 3


def test_no_more_groups_lead_than_a_lease_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_BYTES", 10)
    groups = tuple((task, (task, task)) for task in "abc")
    assert leading(groups, {"a": 2, "b": 3, "c": 1}) == groups[:2]
    assert leading(groups, {"a": 1, "b": 1, "c": 1}) == groups
    assert leading(groups, {"a": 5, "b": 0, "c": 0}) == groups
    assert leading(groups, {"a": 6, "b": 0, "c": 0}) == ()


@pytest.mark.parametrize(("unit", "asked", "leased"), [
    ("groups", 5, [[0, 1], [2, 3], [4]]), ("groups", 3, [[0, 1], [2]]), ("groups", 6, []),
    ("episodes", 10, [[0, 1, 2], [3, 4]]), ("episodes", 11, []),
])  # fmt: skip
def test_no_more_episodes_are_leased_at_once_than_others_wait_for(
    monkeypatch: pytest.MonkeyPatch, unit: str, asked: int, leased: list[list[int]]
) -> None:
    """The first come when all are there that are asked for, and a group that is larger comes alone."""
    monkeypatch.setattr(leases, "LEASE_EPISODES", 5)
    rig, found = LedgerRig(LedgerSettings(group_size=2)), list[list[int]]()
    for number in range(10):
        rig.ready(f"t{number // 2}")
    while asked > 0 and (batch := rig.lease(groups=asked, unit=unit)) is not None:
        groups = rig.state.batches[batch].groups
        found.append([int(task[1:]) for task, _ in groups])
        asked -= sum(len(names) for _, names in groups) if unit == "episodes" else len(groups)
    assert found == leased
    monkeypatch.setattr(leases, "LEASE_EPISODES", 1)
    for number in range(2):
        rig.ready(f"s{number}")
        rig.ready(f"s{number}")
    batch = rig.lease(groups=2)
    assert batch is not None and len(rig.state.batches[batch].groups) == 1


def test_who_takes_more_than_a_part_of_a_lease_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_BYTES", 20)
    assert too_large(["a", "b", "c"], {"a": 6, "b": 7, "c": 100}) == ["b", "c"]
    assert too_large(["a", "b"], {"a": 10, "b": 11}) == ["b"]


def test_a_trainer_reads_every_lease() -> None:
    assert leases.LEASE_BYTES < MAX_FRAME_BYTES
    assert leases.LEASE_BYTES // leases._LAID_OUT <= MAX_TOKENS
