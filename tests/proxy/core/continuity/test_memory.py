"""History is known by its words: what is the same conversation, what is another, and which word says so."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.continuity.memory import (
    FIELD,
    Known,
    Memory,
    Outcome,
    Outline,
    ended,
    outline,
)
from ajet_proxy.core.conversation.history import ChatHistory, read
from ajet_proxy.core.trajectory.call import Captured
from tests.kit.outlines import recall, remember
from tests.kit.strategies import nested

HELLO = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "again"}
SAID: dict[str, Any] = {"role": "assistant", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}]


def outlined(*messages: dict[str, Any], agent: str = "", episode: str = "ep", **fields: Any) -> Outline:
    found = outline_of({"messages": list(messages), **fields}, episode=episode, agent=agent)
    assert found is not None
    return found


def outline_of(fields: dict[str, Any], *, episode: str = "ep", model: str = "m", agent: str = "") -> Outline | None:
    history = read(ChatHistory, fields, b"scope")
    assert history is None or isinstance(history, ChatHistory)
    return None if history is None else outline(fields, history, episode=episode, model=model, agent=agent)


def recalled(after: Outline, answer: dict[str, Any] | None = None, **first: Any) -> Known | Outcome:
    """Tell what a request finds after the call ``c`` was asked hello and answered."""
    memory = Memory()
    remember(memory, outlined(HELLO, **first), SAID if answer is None else answer, "c", "token")
    return recall(memory, after)


def call(arguments: Any = '{"n": 1}', **more: Any) -> dict[str, Any]:
    return {"id": "t1", "type": "function", "function": {"name": "guess", "arguments": arguments}, **more}


# --- which call a request goes on from


def test_a_turn_goes_on_from_the_call_that_gave_the_last_answer() -> None:
    assert recalled(outlined(HELLO, SAID, AGAIN)) == Known("c", outlined(HELLO).sought.shape, None, "token")
    streamed = outlined(HELLO, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, AGAIN, AGAIN)
    assert isinstance(recalled(streamed), Known)


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (outlined(HELLO), "first_turn"),
        (outlined(HELLO, SAID), "nothing_new"),
        (outlined(AGAIN, SAID, AGAIN), "unknown_history"),
        (outlined(HELLO, {**SAID, "content": "ha"}, AGAIN), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, SAID, AGAIN), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, episode="other"), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, agent="other"), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, tools=TOOLS), "request_changed"),
        (outlined(HELLO, SAID, AGAIN, chat_template_kwargs={"enable_thinking": False}), "request_changed"),
        (outlined(HELLO, SAID, AGAIN, anything_new=1), "request_changed"),
    ],
)
def test_why_a_turn_goes_on_from_none(request_: Outline, word: str) -> None:
    assert recalled(request_) == word
    assert word in get_args(Outcome)


def test_requests_are_of_one_kind_whatever_is_said_in_them() -> None:
    assert outlined(HELLO, tools=TOOLS).kind == outlined(HELLO, SAID, AGAIN, tools=TOOLS).kind != outlined(HELLO).kind


def test_a_name_on_the_models_messages_is_not_among_their_words() -> None:
    signed = {**SAID, "name": "Calculator"}
    after = outlined(HELLO, signed, AGAIN)
    assert isinstance(recalled(after), Known)
    unsigned = after.unsigned()
    assert unsigned is not None and outlined(HELLO, SAID, AGAIN).unsigned() is None
    assert (after.whole()["messages"][1], unsigned["messages"]) == (signed, [HELLO, SAID, AGAIN])


def test_a_name_on_anothers_message_is() -> None:
    after = outlined({**HELLO, "name": "bob"}, SAID, AGAIN)
    assert (recalled(after), after.unsigned()) == ("unknown_history", None)


def test_sampling_may_change_from_turn_to_turn() -> None:
    later = outlined(HELLO, SAID, AGAIN, temperature=0.5, max_tokens=3, stream=True, stop=["x"], tools=None, user="u")
    assert isinstance(recalled(later), Known)


def test_reasoning_must_come_back_with_its_answer() -> None:
    thought = {"content": "hi", "reasoning": "hm"}
    assert isinstance(recalled(outlined(HELLO, {**SAID, "reasoning_content": "hm"}, AGAIN), thought), Known)
    assert recalled(outlined(HELLO, SAID, AGAIN), thought) == "reasoning_left_out"
    assert recalled(outlined(HELLO, {**SAID, "reasoning": "ha"}, AGAIN), thought) == "unknown_history"


def test_what_is_said_beside_a_tool_call_must_come_back_with_it() -> None:
    given = {"content": "hi", "reasoning": "hm", "tool_calls": [call()]}
    told = {"role": "assistant", "tool_calls": [call()]}
    assert recalled(outlined(HELLO, told, AGAIN), given) == "words_left_out"
    assert recalled(outlined(HELLO, {**told, "content": "hi"}, AGAIN), given) == "reasoning_left_out"
    assert recalled(outlined(HELLO, {**told, "content": "ha"}, AGAIN), given) == "unknown_history"
    assert isinstance(recalled(outlined(HELLO, told, AGAIN), {"content": "", "tool_calls": [call()]}), Known)
    assert recalled(outlined(HELLO, {"role": "assistant"}, AGAIN), {"content": "hi"}) == "unknown_history"


def test_an_answer_without_reasoning_is_not_hidden_by_one_with() -> None:
    memory = Memory()
    remember(memory, outlined(HELLO), {"content": "hi", "reasoning": "hm"}, "c1", "token")
    remember(memory, outlined(HELLO), {"content": "hi"}, "c2", "token")
    remember(memory, outlined(HELLO), {"content": "hi", "reasoning": "ho"}, "c3", "token")
    remember(memory, outlined(HELLO), {"content": "ha", "reasoning": "1"}, "c4", "token")
    remember(memory, outlined(HELLO), {"content": "ha", "reasoning": "2"}, "c5", "token")
    found = recall(memory, outlined(HELLO, SAID, AGAIN))
    assert isinstance(found, Known) and found.call == "c2"
    assert recall(memory, outlined(HELLO, {**SAID, "content": "ha"}, AGAIN)) == "reasoning_left_out"


def test_an_answer_cut_at_a_stop_string_has_more_tokens_than_text() -> None:
    memory = Memory()
    remember(memory, outlined(HELLO), SAID, "c", "string")
    assert recall(memory, outlined(HELLO, SAID, AGAIN)) == "stop_string"


def test_of_two_answers_with_the_same_words_the_later_counts() -> None:
    memory = Memory()
    for name in ("c1", "c2"):
        remember(memory, outlined(HELLO), SAID, name, "token")
    found = recall(memory, outlined(HELLO, SAID, AGAIN))
    assert isinstance(found, Known) and found.call == "c2"
    assert len(memory) == 1


def test_the_answers_of_calls_that_nothing_goes_on_from_are_forgotten() -> None:
    memory = Memory()
    for name, answer in (("c1", SAID), ("c2", SAID), ("c1", {"content": "ha"}), ("c3", {"content": "ho"})):
        remember(memory, outlined(HELLO), answer, name, "token")
    memory.forget(["c1", "never"])
    found = recall(memory, outlined(HELLO, SAID, AGAIN))
    assert isinstance(found, Known) and found.call == "c2", "its answer has the place of the first"
    assert recall(memory, outlined(HELLO, {**SAID, "content": "ha"}, AGAIN)) == "unknown_history"
    memory.forget(["c2", "c3"])
    assert vars(memory) == vars(Memory())


def test_the_oldest_answers_are_forgotten_first() -> None:
    memory = Memory(capacity=2)
    for name in ("a", "b", "a", "c"):
        remember(memory, outlined(HELLO), {"content": name}, name, "token")
    answers = [{**SAID, "content": name} for name in "abc"]
    found = [recall(memory, outlined(HELLO, answer, AGAIN)) for answer in answers]
    assert [known if isinstance(known, str) else known.call for known in found] == ["a", "unknown_history", "c"]
    assert len(memory) == 2


texts = st.sampled_from(["", "a", " a", "a ", "<|im_end|>", "é", "\ud83d", '{"a": 1}'])
roles = st.sampled_from(["user", "tool", "system"])
messages = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, roles, texts), min_size=1, max_size=4)


@given(first=messages, answer=texts, new=messages, change=st.integers(0, 3), by=texts)
def test_a_changed_beginning_is_never_taken_for_the_episodes_own(
    first: list[dict[str, Any]], answer: str, new: list[dict[str, Any]], change: int, by: str
) -> None:
    memory = Memory()
    remember(memory, outlined(*first), {"content": answer}, "c", "token")
    said = {"role": "assistant", "content": answer}
    assert isinstance(recall(memory, outlined(*first, said, *new)), Known)
    place = change % len(first)
    changed = [*first[:place], {**first[place], "content": by}, *first[place + 1 :]]
    found = recall(memory, outlined(*changed, said, *new))
    assert isinstance(found, Known) == (changed == first)
    assert recall(memory, outlined(*first, first[0], said, *new)) == "unknown_history"


# --- requests that are more than their messages


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "hello"},
        {"messages": ["hello"]},
        {},
        {"messages": [HELLO], "echo": True},
        {"messages": [HELLO], "continue_final_message": True},
        {"messages": [HELLO], "add_generation_prompt": False},
        {"messages": [HELLO], "truncate_prompt_tokens": 5},
        {"messages": [HELLO], "return_prompt_text": True},
        {"messages": [HELLO], "kv_transfer_params": {"prompt_token_ids": [1]}},
        {"messages": [{"role": "user", "content": [{"type": "other", "deep": nested()}]}]},
        {"messages": [HELLO], "metadata_": nested()},
    ],
)
def test_some_requests_have_no_outline(fields: dict[str, Any]) -> None:
    assert outline_of(fields) is None


# --- what the engine is asked to render


def test_the_engine_is_asked_for_the_request_as_it_would_render_it() -> None:
    asked = outlined(
        HELLO, SAID, AGAIN, tools=TOOLS, chat_template="{{ x }}", chat_template_kwargs={"a": 1}, temperature=0.5,
        documents=[{"text": "d"}], reasoning_effort="low", add_special_tokens=True, max_tokens=7,
    )  # fmt: skip
    shaped = {
        "model": "m", "tools": TOOLS, "chat_template": "{{ x }}", "add_special_tokens": True,
        "chat_template_kwargs": {
            "a": 1, "documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True
        },
    }  # fmt: skip
    assert asked.whole() == {**shaped, "messages": [HELLO, SAID, AGAIN]}
    assert asked.asked_before() == {**shaped, "messages": [HELLO]}
    marked = [HELLO, {"role": "assistant", "content": "mark"}, AGAIN]
    assert asked.with_answer("mark") == {**shaped, "messages": marked}
    assert asked.question_with_answer("mark") == asked.question() | {"messages": marked}
    assert asked.answer_tokens == 7


def test_a_plain_request_is_rendered_plainly() -> None:
    plain = outline_of({"messages": [HELLO]}, model="")
    assert plain is not None
    assert plain.whole() == {"messages": [HELLO]}
    assert plain.answer_tokens == 1


@pytest.mark.parametrize(
    ("finish_reason", "stop_string", "called", "word"),
    [("stop", None, False, "token"), ("length", None, False, "length"), ("tool_calls", None, True, "call"),
     ("length", None, True, "call"), ("stop", None, True, "call"), ("stop", "\n", False, "string"),
     ("stop", "\n", True, "string")],
)  # fmt: skip
def test_how_an_answer_ended(finish_reason: str, stop_string: str | None, called: bool, word: str) -> None:
    captured = Captured(0, "m", (1,), (2,), (-0.5,), finish_reason, stop_string=stop_string)
    assert ended(captured, called) == word


def test_whether_an_answer_calls_tools() -> None:
    asked = outlined(HELLO)
    assert asked.called({"role": "assistant", "tool_calls": [{"id": "c"}]})
    assert not any(map(asked.called, ({"content": "hi"}, {"tool_calls": []}, {"tool_calls": None})))


def test_a_trial_is_a_request_with_the_ids_and_one_token() -> None:
    asked, one = Outline.trial("m", (5, 5, 5)), {"max_tokens": 1, "return_token_ids": True}
    assert asked.items() >= {**one, "model": "m", FIELD: {"prompt_token_ids": [5, 5, 5]}}.items()


@pytest.mark.parametrize(("answer", "prompt"), [
    ({"prompt_token_ids": [1, 2]}, (1, 2)), ({"prompt_token_ids": None}, None), ({"prompt_token_ids": ["a"]}, None),
    ({}, None),
])  # fmt: skip
def test_the_prompt_that_an_answer_reports(answer: dict[str, Any], prompt: Any) -> None:
    assert Outline.prompt_in(answer) == prompt


@pytest.mark.parametrize(
    ("messages", "fields", "heeds"),
    [
        ([HELLO, SAID | {"reasoning": "r"}, AGAIN], {"stream": True}, True),
        ([HELLO, SAID | {"reasoning_content": "r"}, AGAIN], {"response_format": {"type": "json_object"}}, True),
        ([HELLO, SAID | {"reasoning": "r"}, AGAIN], {"stream": False, "tools": TOOLS, "tool_choice": "auto"}, False),
        ([HELLO, SAID | {"reasoning": "r"}, AGAIN], {"tools": TOOLS, "tool_choice": "required"}, True),
        ([HELLO, SAID | {"reasoning": None}, AGAIN], {"stream": True, "tools": TOOLS}, False),
    ],
)
def test_reasoning_matters_where_the_engine_looks_for_it(
    messages: list[dict[str, Any]], fields: dict[str, Any], heeds: bool
) -> None:
    assert outlined(*messages, **fields).heeds_reasoning is heeds


def test_the_chat_route_is_asked_what_it_reads_by_one_token_of_the_same_kind_of_request() -> None:
    fields = {"tools": TOOLS, "tool_choice": "none", "reasoning_effort": "low", "cache_salt": "mine"}
    asked = outlined(HELLO, n=3, stream=True, max_completion_tokens=9, min_tokens=5, seed=1, **fields)
    question = asked.question()
    assert question == {
        "model": "m", "messages": [HELLO], **fields, "max_tokens": 1, "return_token_ids": True,
    }  # fmt: skip
    del question["messages"]
    assert outlined(HELLO, **question).kind == asked.kind


def test_one_word_is_asked_for_behind_either_prompt() -> None:
    asked = outlined(HELLO, temperature=0.5, tools=TOOLS)
    plain = asked.whole() | {"stream": True, "max_tokens": 1, "allowed_token_ids": [9]}
    assert asked.first_word(9, None) == plain
    assert asked.first_word(9, (5, 6)) == plain | {FIELD: {"prompt_token_ids": [5, 6]}}


@pytest.mark.parametrize(
    ("stream", "name"),
    [
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
         b'data: {"choices":[{"delta":{"content":"q"}}]}\n\ndata: [DONE]\n\n', "content"),
        (b'data:{"choices":[{"delta":{"reasoning":"q"}}]}\r\n\r\n', "reasoning"),
        (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', None),
        (b'{"error": {"message": "no"}}', None), (b"data: " + b"[" * 100_000, None),
    ],
)  # fmt: skip
def test_as_what_the_first_word_came(stream: bytes, name: str | None) -> None:
    assert Outline.heard_as(stream) == name
