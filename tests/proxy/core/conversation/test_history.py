"""A client that goes on with what it was told is recognised, whatever it changes in passing; nobody else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.conversation.history import (
    ChatHistory,
    Mark,
    Marks,
    PromptHistory,
    marks_of,
    read,
)
from ajet_proxy.core.trajectory.call import Captured
from tests.proxy.core.conversation.histories import history_of

CHAT, COMPLETIONS = ChatHistory, PromptHistory.of
SCOPE, OTHER = b"s" * 32, b"o" * 32
USER: dict[str, Any] = {"role": "user", "content": "guess"}
NEXT: dict[str, Any] = {"role": "user", "content": "higher"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
TOLD: dict[str, Any] = {"role": "assistant", "content": "ok", "tool_calls": [CALL]}
SYSTEM = {"role": "system", "content": "x-anthropic-billing-header: cch=1;\n\nYou help."}

words = st.text(st.sampled_from("ab \n<>"), max_size=4)
messages = st.lists(st.builds(lambda role, text: {"role": role, "content": text},
                              st.sampled_from(("system", "user", "assistant", "tool")), words), max_size=5)


def captured(prompt: tuple[int, ...] = (1, 2), sampled: tuple[int, ...] = (3,)) -> Captured:
    return Captured(0, "m", prompt, sampled, (-0.5,) * len(sampled), "stop")


def after(asked: list[Any], told: dict[str, Any], scope: bytes = SCOPE) -> Mark:
    """Where the history of a chat ends, if the answer is a message of its own."""
    mark, *_ = history_of(CHAT, {"messages": asked}, scope).after(told, captured())
    return mark


def beginnings(asked: list[Any], scope: bytes = SCOPE) -> list[Mark]:
    return list(history_of(CHAT, {"messages": asked}, scope).beginnings((0,)))


def goes_on(asked: list[Any], told: dict[str, Any], later: list[Any]) -> bool:
    return after(asked, told).key in [mark.key for mark in beginnings(later)]


@given(messages, words, messages)
def test_a_conversation_that_goes_on_begins_with_what_was_said(asked: Any, told: str, more: Any) -> None:
    said = {"role": "assistant", "content": told}
    marks = beginnings([*asked, said, *more])
    assert after(asked, {"content": told}) in marks
    assert len(marks) == 1 + sum(message["role"] == "assistant" for message in (*asked, *more))
    assert marks[-1:] == beginnings([*asked, said])[-1:]  # the longest comes first
    assert after(asked, {"content": told}) not in beginnings([*asked, said, *more], OTHER)


@pytest.mark.parametrize("again", [
    {**TOLD, "content": " ok\n"},
    {**TOLD, "content": [{"type": "text", "text": "ok"}]},
    {**TOLD, "content": "<think>well</think>\nok", "refusal": None, "name": "me"},
    {**TOLD, "content": "well</think>ok<think>unfinished"},
    {**TOLD, "tool_calls": [{**CALL, "id": "mine"}]},
    {**TOLD, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":2,"b":1}'}}]},
    {**TOLD, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2, "b": 1}}}]},
    {"role": "assistant", "content": "ok", "function_call": CALL["function"]},
])  # fmt: skip
def test_what_clients_change_in_passing_does_not_count(again: dict[str, Any]) -> None:
    assert goes_on([USER], TOLD, [USER, again, NEXT])
    assert goes_on([USER], again, [USER, TOLD, NEXT])


@pytest.mark.parametrize("later", [
    [USER, {**TOLD, "content": "ko"}], [USER, {**TOLD, "tool_calls": []}], [NEXT, TOLD], [TOLD], [USER, NEXT, TOLD],
    [USER, {**TOLD, "tool_calls": [CALL, CALL]}], [USER, {**TOLD, "role": "user"}], [SYSTEM, USER, TOLD], [USER],
    [USER, {**TOLD, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 3}'}}]}],
    [USER, {**TOLD, "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]}],
    [USER, {**TOLD, "content": [{"type": "text", "text": "ok"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
])  # fmt: skip
def test_another_history_is_another(later: list[Any]) -> None:
    assert not goes_on([USER], TOLD, [*later, NEXT])


@given(messages, words, words, messages)
def test_an_answer_may_be_the_end_of_the_message_that_the_agent_began(
    asked: Any, begun: str, told: str, more: Any
) -> None:
    user, began = {"role": "user", "content": "go"}, {"role": "assistant", "content": begun}
    own, joined = history_of(CHAT, {"messages": [*asked, user, began]}, SCOPE).after({"content": told}, captured())
    assert own in beginnings([*asked, user, began, {"role": "assistant", "content": told}, *more])
    assert joined in beginnings([*asked, user, {"role": "assistant", "content": begun + told}, *more])
    assert len(history_of(CHAT, {"messages": [*asked, user]}, SCOPE).after({"content": told}, captured())) == 1


def test_the_words_of_two_messages_are_not_those_of_one() -> None:
    assert not goes_on([{"role": "user", "content": "ab"}], TOLD, [
        {"role": "user", "content": "a"}, {"role": "user", "content": "b"}, TOLD,
    ])  # fmt: skip


def test_a_billing_line_and_the_name_of_a_role_may_change() -> None:
    changed = {"role": "developer", "content": "x-anthropic-billing-header: cch=2;\nYou help."}
    assert goes_on([SYSTEM, USER], TOLD, [changed, USER, TOLD])
    assert not goes_on([SYSTEM, USER], TOLD, [{**changed, "content": "You hinder."}, USER, TOLD])
    asked = [USER, TOLD, {"role": "function", "tool_call_id": "call-1", "content": "7"}]
    assert goes_on(asked, TOLD, [USER, TOLD, {"role": "tool", "content": "7"}, TOLD])


def test_arguments_that_nest_too_deeply_are_text() -> None:
    deep = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}
    assert goes_on([USER], deep, [USER, deep])


def test_ids_of_tool_calls_tell_twins_apart() -> None:
    twin = {**TOLD, "tool_calls": [{**CALL, "id": "call-2"}]}
    one, two = after([USER], TOLD), after([USER], twin)
    assert one.key == two.key and one.firm != two.firm
    result = {"role": "tool", "tool_call_id": "call-1", "content": "7"}
    assert beginnings([USER, TOLD, result])[0] == one
    again = after([USER, TOLD, result], TOLD), after([USER, TOLD, {**result, "tool_call_id": "call-2"}], TOLD)
    assert again[0].key == again[1].key and again[0].firm != again[1].firm


def text_marks(asked: Any, told: str = "", **ids: Any) -> tuple[Mark, ...]:
    return tuple(history_of(COMPLETIONS, {"prompt": asked}, SCOPE).after({"text": told}, captured(**ids)))


def begins_with(prompt: Any, mark: Mark, scope: bytes = SCOPE, lengths: Any = ()) -> bool:
    found = list(history_of(COMPLETIONS, {"prompt": prompt}, scope).beginnings({mark.length, *lengths}))
    assert [beginning.length for beginning in found] == sorted((mark.length for mark in found), reverse=True)
    return mark in found


@given(st.text(max_size=5), st.text(min_size=1, max_size=5), st.text(max_size=3), st.sets(st.integers(0, 40)))
def test_a_text_that_goes_on_begins_with_what_was_said(asked: str, told: str, more: str, lengths: set[int]) -> None:
    _, mark = text_marks(asked, told)
    assert begins_with(asked + told + more, mark, lengths=lengths)
    assert not begins_with(asked + told + more, mark, OTHER)
    assert set(asked + told) == {"x"} or not begins_with("x" + asked + told, mark)


IDS = st.lists(st.integers(0, 9), max_size=5).map(tuple)


@given(IDS, IDS.filter(bool), IDS)
def test_ids_that_go_on_begin_with_what_was_sampled(asked: Any, sampled: Any, more: Any) -> None:
    for prompt in ("a text of those ids", list(asked)):
        mark = text_marks(prompt, "", prompt=asked, sampled=sampled)[0]
        assert begins_with([*asked, *sampled, *more], mark)
        assert set(asked + sampled) == {9} or not begins_with([9, *asked, *sampled], mark)


@pytest.mark.parametrize("prompt", ["hello", [1, 2]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: Any) -> None:
    assert text_marks([prompt], " there") == text_marks(prompt, " there") != ()
    assert all(begins_with([prompt], mark) == begins_with(prompt, mark) for mark in text_marks(prompt, " there"))


def test_a_text_is_no_list_of_ids() -> None:
    (mark,) = text_marks([97], "", prompt=(97,), sampled=(98,))
    assert not begins_with("a\0\0\0b\0\0\0c", mark)


def test_a_prompt_that_was_answered_with_nothing_is_no_mark() -> None:
    assert text_marks("again", "", sampled=()) == ()
    assert text_marks([1, 2], "words", prompt=(1, 2), sampled=()) == ()


@pytest.mark.parametrize(("kind", "body"), [
    (CHAT, {}), (CHAT, {"messages": 7}), (CHAT, {"messages": ["x"]}), (CHAT, {"messages": [{"content": "x"}]}),
    (CHAT, {"messages": [{"role": ["no", "text"], "content": "x"}]}),
    (CHAT, {"messages": [{"role": 1}]}), (CHAT, {"messages": [{"role": "user", "content": 7}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
    (COMPLETIONS, {}), (COMPLETIONS, {"prompt": ["two", "texts"]}), (COMPLETIONS, {"prompt": [[1], [2]]}),
    (COMPLETIONS, {"prompt": [2**31]}), (COMPLETIONS, {"prompt": None}),
])  # fmt: skip
def test_what_is_malformed_has_no_history(kind: Any, body: dict[str, Any]) -> None:
    assert not known_by_words(kind, body)


@pytest.mark.parametrize("said", [{}, {"role": "user"}, True, 7, None])
def test_only_a_list_is_a_list_of_messages(said: Any) -> None:
    assert read(CHAT, {"messages": said}, SCOPE) is None


def known_by_words(kind: Any, body: dict[str, Any]) -> bool:
    """Tell whether a later request could continue it."""
    for exact in (True, False):
        history = read(kind, body, SCOPE, exact=exact)
        if history is not None and [*history.beginnings((1, 2, 4)), *marks_of(history, TOLD, captured())]:
            return True
    return False


def test_texts_may_be_no_unicode() -> None:
    lone = json.loads('"\\ud800"')
    assert goes_on([{"role": "user", "content": lone}], {"content": lone}, [
        {"role": "user", "content": lone}, {"role": "assistant", "content": lone},
    ])  # fmt: skip


def test_an_answer_that_cannot_be_told_leaves_no_mark() -> None:
    chat, whole = read(CHAT, {"messages": [USER]}, SCOPE), captured()
    assert marks_of(chat, TOLD, whole) == (after([USER], TOLD),)
    for said, history in ((None, chat), (TOLD, None), ({"tool_calls": [{}]}, chat), ({"content": 7}, chat)):
        assert marks_of(history, said, whole) == ()


def test_marks_that_another_process_has_read_are_the_beginnings() -> None:
    history = history_of(CHAT, {"messages": [USER, TOLD, NEXT, TOLD]})
    assert list(Marks(history.beginnings(())).beginnings((3,))) == list(history.beginnings(()))
