"""The level of text: two messages are the same only if no template can tell them apart; and the two levels agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.conversation.history import ChatHistory, packed, text_of
from tests.kit.strategies import nested
from tests.proxy.core.conversation.histories import history_of


def call(arguments: Any = '{"n": 1}', **more: Any) -> dict[str, Any]:
    return {"id": "t1", "type": "function", "function": {"name": "guess", "arguments": arguments}, **more}


def form(message: dict[str, Any]) -> bytes:
    return packed(text_of({"role": "assistant", **message}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
        ({"content": "a"}, {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
        ({"content": None}, {"content": ""}),
        ({"content": ""}, {}),
        ({"content": []}, {}),
        ({"content": "a", "refusal": None, "annotations": [], "extra": {"refusal": None}}, {"content": "a"}),
        ({"content": "a", "tool_calls": []}, {"content": "a", "tool_calls": None}),
        ({"reasoning": "r"}, {"reasoning_content": "r"}),
        ({"reasoning": "r", "reasoning_content": "r"}, {"reasoning": "r"}),
        ({"tool_calls": [call('{"a":1,"b":[2]}')]}, {"tool_calls": [call('{ "b": [2], "a": 1 }', index=0)]}),
        ({"tool_calls": [call("")]}, {"tool_calls": [call("{}")]}),
        ({"tool_calls": [call(None)]}, {"tool_calls": [call("{}", type=None)]}),
        ({"content": "a"}, {"content": "a", "name": "bob"}),
    ],
)
def test_only_text_and_structure_count(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert form(one) == form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a"}, {"content": "a "}),
        ({"content": "ab"}, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        ({"content": "a"}, {"content": [{"type": "image_url", "image_url": {"url": "a"}}]}),
        ({"content": "a", "role": "user"}, {"content": "a", "role": "user", "name": "bob"}),
        ({"content": "a"}, {"content": "a", "role": "user"}),
        ({"content": "a"}, {"content": "a", "reasoning": "r"}),
        ({"tool_calls": [call()]}, {"tool_calls": [call('{"n": 1.0}')]}),
        ({"tool_calls": [call('{"n": null}')]}, {"tool_calls": [call("{}")]}),
        ({"tool_calls": [call("{broken")]}, {"tool_calls": [call("{ broken")]}),
        ({"tool_calls": [call()]}, {"tool_calls": [call(id="t2")]}),
        ({"tool_calls": [call()]}, {"tool_calls": [call(), call()]}),
        ({"tool_calls": [call()]}, {"tool_calls": [call(type="custom")]}),
        ({"tool_calls": [call()]}, {"tool_calls": ["guess"]}),
        ({"tool_calls": [call()]}, {"tool_calls": [{"id": "t1", "function": "guess"}]}),
        ({"tool_calls": [call()]}, {"tool_calls": "guess"}),
    ],
)
def test_what_differs_in_words_or_structure_is_another_message(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert form(one) != form(other)


def test_the_order_of_names_counts_in_a_list_alone() -> None:
    one, other = {"a": "x", "b": {"c": 1, "d": 2}}, {"b": {"d": 2, "c": 1}}
    for value in (one, {**one, "half": "\ud83d"}, {**one, "long": 2**70}):
        again = dict(reversed({**value, "b": other["b"]}.items()))
        assert packed(value) == packed(again)
        assert packed([value]) != packed([again])
        assert packed(value) != packed({**value, "a": "y"})


texts = st.sampled_from(["", "a", " a", "a ", "<think>b</think>a", "\ud83d", '{"a": 1}'])
answers = st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}, optional={
    "reasoning": texts, "tool_calls": st.lists(st.builds(call, texts, id=st.sampled_from("xy")), max_size=2),
    "name": texts,
})  # fmt: skip
others = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(("user", "tool", "system")), texts
)
messages = st.lists(answers | others, max_size=5)


def chat(said: list[Any], **how: bool) -> Any:
    return history_of(ChatHistory, {"messages": said}, **how)


@given(messages, messages)
def test_texts_are_equal_exactly_where_all_messages_are(one: list[Any], other: list[Any]) -> None:
    assert (chat(one).text() == chat(other).text()) == (list(map(form, one)) == list(map(form, other)))


@given(messages, messages)
def test_what_has_the_same_text_has_the_same_words(one: list[Any], other: list[Any]) -> None:
    """But for arguments that are missing: as text they are those of an empty object, as words nothing."""
    if chat(one).text() == chat(other).text():
        assert list(chat(one).beginnings(())) == list(chat(other).beginnings(()))


@given(messages)
def test_the_text_up_to_the_last_answer_is_that_of_the_history_that_ends_there(said: list[Any]) -> None:
    history = chat(said)
    if history.answer is None:
        assert not [one for one in said if one["role"] == "assistant"] and history.answer_text is None
        return
    before, answer = chat(said[: history.answer]), said[history.answer]
    assert history.answer_text == before.text(text_of(answer)) == chat(said[: history.answer + 1]).text()
    assert all(one["role"] != "assistant" for one in said[history.answer + 1 :])


@given(messages)
def test_words_do_not_depend_on_whether_text_is_wanted(said: list[Any]) -> None:
    plain = chat(said, exact=False)
    assert list(plain.beginnings(())) == list(chat(said).beginnings(()))
    assert not plain.exact


def test_what_cannot_be_told_at_one_level_may_be_told_at_the_other() -> None:
    answer = {"role": "assistant", "content": "a"}
    deep = chat([answer, {"role": "user", "content": "b", "more": nested()}, answer])
    assert not deep.exact and len(list(deep.beginnings(()))) == 2
    wordless = chat([answer, {"role": "user", "content": 7}, answer])
    assert wordless.exact and list(wordless.beginnings(())) == [] == list(wordless.after(answer, None))
