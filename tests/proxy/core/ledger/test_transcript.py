"""Calls and their texts: what is kept of them, and that each can be read back."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger.transcript import Asked, CallEntry, Transcript
from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.timeline import Policy, merge, pack, with_tokens
from ajet_sdk.sample import Call
from tests.kit.strategies import conversations, make_call, tangled_calls

ASKED = Asked(0.0, "m", "", "path", "", None)


def told(known: Transcript, call: Call) -> None:
    """`call` is complete."""
    entry = known.calls[call.call] = CallEntry(ASKED, "complete")
    known.finish(entry, pack(call), (0, 0), ahead=False)


def test_text_is_kept_as_timelines() -> None:
    known = Transcript()
    for name, at in (("c0", 0.0), ("c1", 1.0)):
        told(known, make_call(name, [1], [2], at=at, model=name))
    before = known.merging("strict")()
    assert len(before) == 2
    assert known.timelines == ()
    known.keep_timelines("strict")
    assert known.timelines == before == known.merging("off")()
    assert {entry.text for entry in known.calls.values()} == {None}
    assert [turn.call for turn in known.turns()] == ["c0", "c1"]
    assert [len(timeline) for timeline in before] == [2, 2]
    assert known.size() == 4 * 2 + 8 * 2


@given(st.one_of(tangled_calls(), conversations()))
def test_sharing_text_changes_nothing(calls: list[Call]) -> None:
    known = Transcript()
    for call in calls:
        told(known, call)
    assert known.merging("strict")() == merge(calls)
    assert [known.packed(call.call) for call in calls] == [pack(call) for call in calls]
    assert with_tokens(known.keep_timelines("strict"), known.texts) == known.timelines == merge(calls)


def test_the_nearest_calls_of_one_kind_are_told_until_the_episode_is_merged() -> None:
    known = Transcript()
    calls = [
        make_call("a", (1,), (2,), at=1.0), make_call("b", (1, 2, 3), (4,), at=2.0),
        make_call("c", (1,), (2,), at=3.0, agent="judge"), make_call("d", (1,), (2,), at=3.0, model="other"),
    ]
    for call in calls:
        told(known, call)
    known.calls["e"] = replace(known.calls["a"], turn=None)
    assert known.nearest("m", "", pack_tokens((1, 2, 3))) == [pack(calls[1]), pack(calls[0])]
    known.keep_timelines("strict")
    assert known.nearest("m", "", pack_tokens((1, 2, 3))) == []


def test_a_conversation_costs_its_length_once() -> None:
    known = Transcript()
    for end in range(2, 200):
        told(known, make_call(f"c{end}", range(end), [end], at=float(end)))
    (text,) = known.texts.texts
    assert len(text.tokens) == 4 * 200
    (timeline,) = known.merging("strict")()
    assert len(timeline) == 200


@pytest.mark.parametrize("policy", ["strict", "repair", "off"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_merging_takes_no_room_for_the_tokens_of_all_calls(policy: Policy, goes_on: bool) -> None:
    """A conversation that goes on, or begins a timeline at each turn. Its calls have 16 MB of tokens, 320 kB of them
    distinct."""
    known, turns, step = Transcript(), 100, 800
    for turn in range(turns):
        told(known, make_call(f"c{turn}", range(turn * step), [turn * step if goes_on else 7], at=float(turn)))
    tracemalloc.start()
    known.keep_timelines(policy)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(known.chains) == (1 if goes_on and policy != "off" else turns)
    assert most < 8 * (4 * turns * step)


def test_calls_are_read_from_the_text_that_they_share() -> None:
    known = Transcript()
    for name, prompt in (("a", (1, 2)), ("b", (1, 2, 9, 4)), ("c", (8,))):
        told(known, make_call(name, prompt, (9,)))
    assert known.beginning("a", 3) == pack_tokens((1, 2, 9))
    assert known.beginning("b", 5) == pack_tokens((1, 2, 9, 4, 9))
    assert known.packed("b") == pack(make_call("b", (1, 2, 9, 4), (9,)))
    known.calls["b"].turn = None
    assert known.packed("b") is known.packed("no") is None
    assert known.beginning("b", 3) == pack_tokens((1, 2, 9))
    known.keep_timelines("strict")
    assert (known.packed("a"), [len(timeline) for timeline in known.timelines]) == (None, [3, 2])
    for call in ("b", "no"):
        with pytest.raises(KeyError):
            known.beginning(call, 3)


def test_why_calls_were_lost_what_was_most_often_first() -> None:
    lost = [CallEntry(ASKED, "lost", reason) for reason in ("disconnected", "no_token_ids", "retried", "no_token_ids")]
    known = Transcript(dict(zip("abcde", [*lost, CallEntry(ASKED)], strict=True)))
    assert known.losses() == "no_token_ids, disconnected"
    assert Transcript().losses() is None
