"""Histories told in items, or by a name: what is the same conversation, and what the engine is asked about it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.continuity.memory import FIELD, Known, Memory, Outcome
from ajet_proxy.core.conversation.history import read
from ajet_proxy.core.protocol.responses.history import ResponseHistory
from ajet_proxy.core.protocol.responses.outline import Responding, outline
from tests.kit.outlines import recall, remember
from tests.kit.strategies import nested

HELLO = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "again"}
SAID: dict[str, Any] = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "guess", "arguments": '{"n": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "higher"}
TOOL = {"type": "function", "name": "guess", "description": None, "parameters": {"type": "object"}}


def outlined(*items: Any, agent: str = "", episode: str = "ep", **fields: Any) -> Responding:
    found = outline_of({"input": list(items), **fields}, episode=episode, agent=agent)
    assert found is not None
    return found


def outline_of(fields: dict[str, Any], *, episode: str = "ep", agent: str = "") -> Responding | None:
    history = read(ResponseHistory, fields, b"scope")
    assert history is None or isinstance(history, ResponseHistory)
    return None if history is None else outline(fields, history, episode=episode, model="m", agent=agent)


def recalled(after: Responding, *output: Any, shown: Any = None, **first: Any) -> Known | str:
    """Tell what a request finds after the call ``c`` was asked hello and answered as the response ``resp_1``."""
    memory = Memory()
    given = {"id": "resp_1", "output": list(output or (SAID,)), "shown": shown}
    remember(memory, outlined(HELLO, **first), given, "c", "token")
    return recall(memory, after)


@pytest.mark.parametrize(("output", "called"), [
    ([CALL], True), ([THOUGHT, SAID, CALL], True), ([SAID], False), ([], False), (None, False), ("x", False),
    ([7], False),
])  # fmt: skip
def test_whether_an_answer_calls_tools(output: Any, called: bool) -> None:
    assert outlined(HELLO).called({"id": "r", "output": output, "shown": None}) == called


# --- which call a request goes on from


@pytest.mark.parametrize(
    "output", [(SAID,), (CALL,), (THOUGHT, SAID), (THOUGHT, SAID, CALL, {**CALL, "call_id": "c2"})]
)
def test_a_turn_goes_on_from_the_call_that_gave_the_last_answer(output: tuple[Any, ...]) -> None:
    known = recalled(outlined(HELLO, *output, RESULT), *output)
    assert known == Known("c", outlined(HELLO).sought.shape, None, "token")


def test_items_come_back_in_other_clothes() -> None:
    sent = [{"role": "assistant", "content": "hi"}, {**CALL, "arguments": '{"n":1}', "id": "fc", "status": "completed"}]
    assert isinstance(recalled(outlined(HELLO, *sent, RESULT), SAID, CALL), Known)


def test_a_text_is_a_message_of_the_users() -> None:
    first = outline_of({"input": "hello"})
    assert first is not None and first.history.text() == outlined(HELLO).history.text()


def test_a_streamed_answer_is_known_as_its_events_told_it_and_as_its_end_did() -> None:
    shown = [{**CALL, "call_id": "other"}]
    for call in ("c1", "other"):
        after = outlined(HELLO, {**CALL, "call_id": call}, {**RESULT, "call_id": call})
        assert isinstance(recalled(after, CALL, shown=shown), Known)
    after = outlined(HELLO, {**CALL, "call_id": "third"}, RESULT)
    assert recalled(after, CALL, shown=shown) == "unknown_history"


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (outlined(HELLO), "first_turn"),
        (outlined(HELLO, SAID), "nothing_new"),
        (outlined(AGAIN, SAID, AGAIN), "unknown_history"),
        (outlined(HELLO, THOUGHT, SAID, AGAIN), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, episode="other"), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, agent="other"), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, instructions="Guess."), "unknown_history"),
        (outlined(HELLO, SAID, AGAIN, tools=[TOOL]), "request_changed"),
        (outlined(HELLO, SAID, AGAIN, reasoning={"effort": "low"}), "request_changed"),
        (outlined(HELLO, SAID, AGAIN, anything_new=1), "request_changed"),
        (outlined(AGAIN, previous_response_id="resp_2"), "unknown_history"),
        (outlined(AGAIN, previous_response_id="resp_1", instructions="Guess."), "request_changed"),
        (outlined(AGAIN, previous_response_id="resp_1", episode="other"), "unknown_history"),
    ],
)
def test_why_a_turn_goes_on_from_none(request_: Responding, word: str) -> None:
    assert recalled(request_) == word
    assert word in get_args(Outcome)


def test_sampling_may_change_from_turn_to_turn() -> None:
    later = outlined(HELLO, SAID, AGAIN, temperature=0.5, max_output_tokens=3, stream=True, include=[], store=False)
    assert isinstance(recalled(later), Known)


def test_reasoning_must_come_back_with_its_answer() -> None:
    assert recalled(outlined(HELLO, SAID, AGAIN), THOUGHT, SAID) == "reasoning_left_out"
    empty = {"type": "reasoning", "summary": []}
    assert recalled(outlined(HELLO, empty, SAID, AGAIN), THOUGHT, SAID) == "reasoning_left_out"


def test_a_response_that_is_named_is_gone_on_from_whatever_it_said() -> None:
    for output in ((SAID,), (THOUGHT, CALL), ()):
        after = outlined(AGAIN, previous_response_id="resp_1", instructions="Guess.")
        assert isinstance(recalled(after, *output, instructions="Guess."), Known)
    assert recalled(outlined(AGAIN, previous_response_id="resp_1"), store=False) == "unknown_history"


def test_a_chain_of_names() -> None:
    memory = Memory()
    remember(memory, outlined(HELLO), {"id": "resp_1", "output": [SAID], "shown": None}, "c1", "token")
    second = outlined(AGAIN, previous_response_id="resp_1")
    remember(memory, second, {"id": "resp_2", "output": [SAID], "shown": None}, "c2", "token")
    found = recall(memory, outlined(AGAIN, previous_response_id="resp_2"))
    assert isinstance(found, Known) and found.call == "c2"
    assert recall(memory, outlined(AGAIN, SAID, AGAIN)) == "unknown_history", "what came before the name is not known"


@pytest.mark.parametrize("output", [[SAID, SAID], [], "hi", [HELLO], [{"type": "web_search_call", "id": "w"}]])
def test_an_answer_that_is_not_one_message_has_only_its_name(output: Any) -> None:
    memory = Memory()
    remember(memory, outlined(HELLO), {"id": "resp_1", "output": output, "shown": None}, "c", "token")
    assert len(memory) == 1
    assert isinstance(recall(memory, outlined(AGAIN, previous_response_id="resp_1")), Known)


texts = st.sampled_from(["", "a", " a", "a ", "<|im_end|>", "é", "\ud83d", '{"a": 1}'])
items = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, texts),
        st.builds(lambda text: {**RESULT, "output": text}, texts),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@given(first=items, answer=texts, new=items, change=st.integers(0, 3), by=texts)
def test_a_changed_beginning_is_never_taken_for_the_episodes_own(
    first: list[Any], answer: str, new: list[Any], change: int, by: str
) -> None:
    memory = Memory()
    said = {"role": "assistant", "content": answer}
    remember(memory, outlined(*first), {"id": "r", "output": [said], "shown": None}, "c", "token")
    assert isinstance(recall(memory, outlined(*first, said, *new)), Known)
    place = change % len(first)
    field = "content" if "content" in first[place] else "output"
    changed = [*first[:place], {**first[place], field: by}, *first[place + 1 :]]
    found = recall(memory, outlined(*changed, said, *new))
    assert isinstance(found, Known) == (changed == first)


# --- requests that are more than their items


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": 7},
        {"input": [7]},
        {"input": [{"type": "item_reference", "id": "m"}]},
        {"input": [HELLO, {**SAID, "status": "incomplete"}]},
        {"input": "a", "background": True},
        {"input": "a", "conversation": "conv_1"},
        {"input": "a", "previous_input_messages": [HELLO]},
        {"input": "a", "truncation": "auto"},
        {"input": "a", "enable_response_messages": True},
        {"input": "a", "kv_transfer_params": {"prompt_token_ids": [1]}},
        {"input": "a", "tools": "guess"},
        {"input": "a", "reasoning": "low"},
        {"input": [SAID, AGAIN], "previous_response_id": "resp_1"},
        {"input": "a", "previous_response_id": 7},
        {"input": "a", "metadata_": nested()},
    ],
)
def test_some_requests_have_no_outline(fields: dict[str, Any]) -> None:
    assert outline_of(fields) is None


# --- what the engine is asked


def test_the_engine_is_asked_to_render_the_messages_it_makes_of_the_items() -> None:
    asked = outlined(
        HELLO, THOUGHT, CALL, RESULT, instructions="Guess.", tools=[TOOL, {"type": "web_search"}],
        reasoning={"effort": "low"}, chat_template_kwargs={"a": 1}, temperature=0.5, max_output_tokens=7,
    )  # fmt: skip
    shaped = {
        "model": "m", "add_special_tokens": True,
        "tools": [{"type": "function", "function": {name: TOOL[name] for name in TOOL if name != "type"}}],
        "chat_template_kwargs": {"a": 1, "reasoning_effort": "low", "enable_thinking": True},
    }  # fmt: skip
    system = {"role": "system", "content": "Guess."}
    result = {"role": "tool", "content": "higher", "tool_call_id": "c1"}
    called = [{"id": "c1", "type": "function", "function": {"name": "guess", "arguments": '{"n": 1}'}}]
    said = {"role": "assistant", "reasoning": "hm", "tool_calls": called}
    assert asked.whole() == {**shaped, "messages": [system, HELLO, said, result]}
    marked = [system, HELLO, {"role": "assistant", "content": "mark"}, result]
    assert asked.with_answer("mark") == {**shaped, "messages": marked}
    assert (asked.answer_tokens, asked.unsigned()) == (7, None)


def test_requests_are_of_one_kind_that_tell_the_same_kinds_of_items() -> None:
    once, twice = outlined(HELLO, SAID, AGAIN), outlined(HELLO, SAID, AGAIN, SAID, HELLO, temperature=0)
    assert once.kind == twice.kind
    assert outlined(HELLO, instructions="a").kind == outlined(AGAIN, instructions="b").kind != outlined(HELLO).kind
    assert len({once.kind, outlined(HELLO).kind, outlined(HELLO, SAID, AGAIN, tools=[TOOL]).kind}) == 3


def test_the_route_is_asked_for_one_token_and_keeps_nothing() -> None:
    asked = outlined(
        HELLO, THOUGHT, SAID, AGAIN, stream=True, include=["x"], top_logprobs=3, request_id="r", text={"a": 1}, seed=3,
        max_output_tokens=99, store=True, instructions="Guess.",
    )  # fmt: skip
    one = {"max_output_tokens": 1, "store": False, "enable_response_messages": True}
    kept = {"model": "m", "text": {"a": 1}, "seed": 3, "instructions": "Guess."} | one
    assert asked.question() == kept | {"input": [HELLO, THOUGHT, SAID, AGAIN]}
    mark = {"type": "message", "role": "assistant", "content": "mark"}
    assert asked.question_with_answer("mark") == kept | {"input": [HELLO, mark, AGAIN], "previous_response_id": None}


def test_a_mark_stands_before_what_follows_a_response_that_is_named() -> None:
    asked = outlined(AGAIN, previous_response_id="resp_1")
    assert asked.question()["previous_response_id"] == "resp_1"
    marked = asked.question_with_answer("mark")
    before = {"type": "message", "role": "user", "content": "?"}
    mark = {"type": "message", "role": "assistant", "content": "mark"}
    assert (marked["input"], marked["previous_response_id"]) == ([before, mark, AGAIN], None)


def test_one_word_is_asked_for_behind_either_prompt() -> None:
    asked = outlined(HELLO, tools=[TOOL], tool_choice="required", text={"format": {"type": "json_object"}})
    plain = asked.first_word(9, None)
    assert plain["stream"] and plain["logit_bias"] == {"9": 100} and plain["max_output_tokens"] == 1
    assert (plain["text"], plain["tool_choice"], plain["temperature"]) == (None, "auto", 0)
    assert asked.first_word(9, (5, 6)) == plain | {FIELD: {"prompt_token_ids": [5, 6]}}


FORMAT = {"format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("items", "fields", "heeds"),
    [
        ([HELLO, THOUGHT, SAID, AGAIN], {"stream": True}, True),
        ([HELLO, THOUGHT, SAID, AGAIN], {"text": FORMAT}, True),
        ([HELLO, THOUGHT, SAID, AGAIN], {"structured_outputs": {"regex": "a"}}, True),
        ([HELLO, THOUGHT, SAID, AGAIN], {"tools": [TOOL], "tool_choice": "required"}, True),
        ([HELLO, THOUGHT, SAID, AGAIN], {"text": {"format": {"type": "text"}}, "tool_choice": "auto"}, False),
        ([HELLO, THOUGHT, SAID, AGAIN], {"text": {"verbosity": "low"}}, False),
        ([HELLO, SAID, AGAIN], {"stream": True}, False),
        ([AGAIN], {"stream": True, "previous_response_id": "r"}, True),
    ],
)
def test_reasoning_matters_where_the_engine_looks_for_it(items: list[Any], fields: dict[str, Any], heeds: bool) -> None:
    assert outlined(*items, **fields).heeds_reasoning is heeds


def test_a_trial_is_a_request_with_the_ids_and_one_token() -> None:
    asked, one = Responding.trial("m", (5, 5, 5)), {"max_output_tokens": 1, "store": False}
    told = {"model": "m", "enable_response_messages": True, FIELD: {"prompt_token_ids": [5, 5, 5]}}
    assert asked.items() >= {**one, **told}.items()


@pytest.mark.parametrize(("answer", "prompt"), [
    ({"input_messages": [{"tokens": [1, 2]}]}, (1, 2)), ({"input_messages": [{"tokens": None}]}, None),
    ({"input_messages": [{"tokens": [1]}, {"tokens": [2]}]}, None), ({"input_messages": ["hi"]}, None),
    ({"input_messages": None}, None), ({}, None),
])  # fmt: skip
def test_the_prompt_that_an_answer_reports(answer: dict[str, Any], prompt: Any) -> None:
    assert Responding.prompt_in(answer) == prompt


@pytest.mark.parametrize(
    ("stream", "name"),
    [
        (b'event: response.created\ndata: {"response":{},"type":"response.created"}\n\n'
         b'event: response.output_text.delta\ndata: {"delta":"q","type":"response.output_text.delta"}\n\n', "content"),
        (b'data: {"delta":"","type":"response.output_text.delta"}\n\n'
         b'data:{"delta":"q","type":"response.reasoning_text.delta"}\n\n', "reasoning"),
        (b'data: {"delta":"q","type":"response.function_call_arguments.delta"}\n\n', None),
    ],
)  # fmt: skip
def test_as_what_the_first_word_came(stream: bytes, name: str | None) -> None:
    assert Responding.heard_as(stream) == name
