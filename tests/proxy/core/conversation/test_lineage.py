"""Calls that nothing names find the episode that they continue, and never another run's."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.conversation import history
from ajet_proxy.core.conversation.history import ChatHistory, Lineage, Mark, Marks, read
from ajet_proxy.core.ledger.commands import CallAsked
from ajet_proxy.core.ledger.events import CallStarted
from ajet_proxy.core.trajectory.call import Captured
from tests.kit.histories import folded
from tests.kit.ledger_rig import LedgerRig
from tests.kit.strategies import packed_call
from tests.proxy.core.conversation.histories import history_of

USER = {"role": "user", "content": "guess"}
CAPTURED = Captured(0, "m", (1,), (2,), (-0.5,), "stop")


def said(text: str, call: str = "") -> dict[str, Any]:
    calls = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}}] if call else []
    return {"role": "assistant", "content": text, "tool_calls": calls}


class Nameless(LedgerRig):
    """A ledger asked by clients that name nothing."""

    def ask(self, messages: list[Any], *, key: str | None = None, retry: bool = False) -> tuple[str, str]:
        """A request as the front takes it: the episode that it belongs to, and its call."""
        past = read(ChatHistory, {"messages": messages}, b"scope")
        sent = {"body_hash": json.dumps(messages), "idempotency_key": key, "retries": int(retry)}
        found = self.state.episodes.continued(past, **sent)
        episode = found[0] if len(found) == 1 else self.id("ep")
        call = self.id("call")
        started = CallStarted(self.at, episode, (call,), "m", "", "lineage", **sent)
        self.run(self.commands.begin_call(CallAsked(started, ""), self.state.episodes.find(episode)))
        return episode, call

    def tell(self, episode: str, call: str, messages: list[Any], answer: dict[str, Any]) -> None:
        """`call` is answered."""
        marks = history_of(ChatHistory, {"messages": messages}).after(answer, CAPTURED)
        whole = packed_call(call, (1,), (2,), at=self.at)
        self.run(self.commands.finish_call(episode, whole, at=self.at, marks=marks))

    def turn(self, messages: list[Any], answer: dict[str, Any], **options: Any) -> str:
        """A whole call; its episode."""
        episode, call = self.ask(messages, **options)
        self.tell(episode, call, messages, answer)
        return episode


def test_a_call_continues_the_episode_that_its_history_ends_in() -> None:
    rig = Nameless()
    first = rig.turn([USER], said("five"))
    other = rig.turn([USER], said("six"))
    assert first != other
    assert rig.turn([USER, said("six"), USER], said("five")) == other
    assert rig.turn([USER, said("five"), USER], said("five")) == first
    assert rig.turn([USER, said("five"), USER, said("five"), USER], said("one")) == first
    assert rig.turn([USER, said("five"), {"role": "user", "content": "sum it up"}], said("fork")) == first
    assert rig.turn([USER, said("seven"), USER], said("one")) not in (first, other)


def test_equal_first_prompts_open_an_episode_each() -> None:
    rig = Nameless()
    asked = [rig.ask([USER]) for _ in range(3)]
    assert len({episode for episode, _ in asked}) == 3
    for episode, call in asked:
        rig.tell(episode, call, [USER], said("five"))
    assert rig.ask([USER])[0] not in {episode for episode, _ in asked}


def test_of_several_beginnings_the_longest_counts() -> None:
    rig = Nameless()
    one, two = rig.turn([USER], said("five")), rig.turn([USER], said("six"))
    longer = rig.turn([USER, said("five"), USER], said("four"))
    assert longer == one
    again = [USER, said("five"), USER, said("four"), USER]
    assert rig.turn([USER, said("six"), USER], said("four")) == two
    assert rig.turn(again, said("three")) == one


def test_a_history_of_two_episodes_begins_a_new_one() -> None:
    rig = Nameless()
    twins = {rig.turn([USER], said("five")) for _ in range(2)}
    history = history_of(ChatHistory, {"messages": [USER, said("five"), USER]})
    assert set(rig.state.episodes.lineage.continued(history)) == twins
    third = rig.turn([USER, said("five"), USER], said("four"))
    assert third not in twins
    assert rig.turn([USER, said("five"), USER, said("four"), USER], said("three")) == third


def test_ids_of_tool_calls_tell_two_episodes_apart() -> None:
    rig = Nameless()
    one, two = rig.turn([USER], said("five", "call-1")), rig.turn([USER], said("five", "call-2"))
    for episode, call in ((one, "call-1"), (two, "call-2")):
        assert rig.ask([USER, said("five", call), {"role": "tool", "content": "7", "tool_call_id": call}])[0] == episode
    assert rig.ask([USER, said("five", "mine"), USER])[0] not in (one, two)


def test_an_episode_that_takes_no_more_calls_is_continued_no_more() -> None:
    rig = Nameless()
    first = rig.turn([USER], said("five"))
    late, call = rig.ask([USER, said("five"), USER])
    assert late == first
    rig.reward(first)
    rig.tell(first, call, [USER, said("five"), USER], said("four"))
    other = rig.turn([USER, said("five"), USER], said("four"))
    assert other != first
    rig.abort(other)
    assert rig.turn([USER, said("five"), USER], said("four")) not in (first, other)


def test_a_first_prompt_of_which_nothing_came_is_asked_again_in_its_episode() -> None:
    rig = Nameless()
    (one, _), (two, lost) = rig.ask([USER]), rig.ask([USER])
    rig.lose(two, lost)
    assert rig.ask([USER])[0] not in (one, two)  # it does not say that it is a retry
    assert rig.ask([USER], retry=True)[0] == two
    assert rig.ask([USER], retry=True)[0] not in (one, two)  # both are being answered now
    assert rig.ask([said("never"), USER], retry=True)[0] not in (one, two)


def test_a_later_prompt_that_is_asked_again_is_found_by_its_history() -> None:
    rig = Nameless()
    first, later = rig.turn([USER], said("five")), [USER, said("five"), USER]
    episode, call = rig.ask(later)
    rig.lose(episode, call)
    assert rig.ask(later, retry=True)[0] == first
    rig.turn([USER], said("five"))
    assert rig.ask(later, retry=True)[0] != first  # it may be the twin's that never arrived


def test_an_idempotency_key_is_the_same_request() -> None:
    rig = Nameless()
    first = rig.turn([USER], said("five"), key="k")
    assert rig.turn([USER], said("six"), key="k") == first
    assert [entry.reason for entry in rig.state.episodes[first].transcript.calls.values()] == ["retried", None]
    assert rig.turn([USER], said("six"), key="other") != first


def test_a_replay_knows_the_same_histories() -> None:
    rig = Nameless()
    rig.turn([USER], said("five"), key="k")
    rig.abort(rig.turn([USER], said("six")))
    assert vars(folded(rig.events, rig.state.settings).episodes.lineage) == vars(rig.state.episodes.lineage)


MARKS = st.builds(Mark, st.sampled_from("abc"), st.sampled_from((0, 3, 7)), st.sampled_from(("", "f")))


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.lists(MARKS, max_size=3) | st.none()), max_size=12))
def test_what_is_dropped_is_forgotten_and_nothing_else(steps: list[tuple[str, list[Mark] | None]]) -> None:
    lineage, kept = Lineage(), dict[str, list[Mark]]()
    for episode, marks in steps:
        if marks is None:
            lineage.drop(episode)
            kept.pop(episode, None)
        else:
            lineage.add(episode, marks)
            kept.setdefault(episode, []).extend(marks)
    fresh = Lineage()
    for episode, marks in kept.items():
        fresh.add(episode, marks)
    assert vars(lineage) == vars(fresh) or not any(kept.values())


@pytest.mark.parametrize("tools", [False, True])
def test_no_episode_ever_holds_the_tokens_of_two_runs(tools: bool) -> None:
    """Runs that begin with one prompt, whose model knows few words; with lost answers, retries and forks."""
    continued = 0
    for seed in range(1000):
        rig, dice = Nameless(), random.Random(seed)
        histories: list[list[list[Any]]] = [[[USER]] for _ in range(dice.randint(2, 4))]
        running: list[tuple[int, str, str, list[Any]]] = []
        whole: dict[str, list[int]] = {}
        for _ in range(40):
            rig.at += 1
            run = dice.randrange(len(histories))
            if len(running) < 2 or dice.random() < 0.4:
                asked = histories[run][-1] if dice.random() < 0.9 else dice.choice(histories[run])
                running.append((run, *rig.ask(asked, retry=dice.random() < 0.2), asked))
                continue
            run, episode, call, asked = running.pop(dice.randrange(len(running)))
            if dice.random() < 0.2:
                rig.lose(episode, call)
                continue
            word = dice.choice(("yes", " yes", "no"))
            answer = said(word, f"call-{run}" if tools else "")
            rig.tell(episode, call, asked, answer)
            if rig.state.episodes[episode].transcript.calls[call].state == "complete":
                whole.setdefault(episode, []).append(run)
            histories[run].append([*asked, {**answer, "content": word.strip()}, USER])
        assert all(len(set(runs)) == 1 for runs in whole.values()), (seed, whole)
        continued += sum(len(runs) > 1 for runs in whole.values())
    assert continued > 1000


def test_the_marks_of_what_takes_no_more_calls_are_kept_for_the_latest() -> None:
    lineage, sealed = Lineage(), Lineage()
    marks = history_of(ChatHistory, {"messages": [USER]}).after(said("five"), CAPTURED)
    later = history_of(ChatHistory, {"messages": [USER, said("five"), USER]})
    for episode in ("one", "two", "three"):
        lineage.add(episode, marks)
        assert lineage.continued(later) == (episode,)
        lineage.hand_over(episode, sealed, 2)
    assert lineage.continued(later) == ()
    assert sorted(sealed.continued(later)) == ["three", "two"]


def test_of_what_takes_no_more_calls_the_latest_marks_are_kept_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_MARKS", 3)
    sealed = Lineage()
    for keys in ("ab", "bc", "dab"):
        lineage = Lineage()
        lineage.add("part", map(Mark, keys))
        lineage.hand_over("part", sealed, 2, "whole")
    assert [sealed.continued(Marks([Mark(key)])) for key in "abcd"] == [("whole",), ("whole",), (), ("whole",)]
    sealed.drop("whole")
    assert not any(sealed.continued(Marks([Mark(key)])) for key in "abcd")
