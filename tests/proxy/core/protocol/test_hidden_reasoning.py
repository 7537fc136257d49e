"""``include_reasoning: false``: what the engine would have sent, made from what it sends when asked for everything."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.chat import Chat, HiddenReasoning
from tests.proxy.core.protocol.answers import CHAT, chat_event, chat_start, document, dump, ids_of, reasons, stream

ASKED = {"include_reasoning": False}
TOOL = {"index": 0}


def thought(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return chat_event(delta, ids=[5], logprobs=[-0.5], **more)


def shown(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return chat_event(delta, **more)


def test_a_trial_shows_whether_the_engine_withholds() -> None:
    doubt = Chat().doubt(ASKED)
    assert doubt is not None
    [(path, body)] = doubt.questions("m")
    assert path == CHAT and Chat().doubt(body) == doubt
    assert (body["model"], body["max_tokens"], body["return_token_ids"]) == ("m", 1, True)
    for ids, hides in ((None, True), ([5], False)):
        settled = doubt.settled([{"choices": [{"token_ids": ids}]}])
        assert settled is not None and settled.ask(ASKED).hide_reasoning is hides
    for other in (None, {}, {"choices": []}, {"choices": [{}]}, 7):
        assert doubt.settled([other]) is None


def test_an_engine_that_does_not_withhold_is_asked_as_the_agent_asked() -> None:
    ask = Chat(withholds=False).ask(ASKED)
    assert not ask.hide_reasoning and "include_reasoning" not in ask.fields
    assert not isinstance(Chat(withholds=False).reader(ask), HiddenReasoning)
    doubts = [Chat().doubt({"include_reasoning": value}) is not None for value in (False, "false", 0, True, None)]
    assert doubts == [True, True, True, False, False]


@pytest.mark.parametrize(("delta", "seen"), [
    ({"content": "a"}, {"content": "a", "reasoning": None}),
    ({"content": "a", "reasoning": "b"}, {"content": "a", "reasoning": None}),
    ({"content": None, "tool_calls": [TOOL]}, {"content": None, "reasoning": None, "tool_calls": [TOOL]}),
    ({"tool_calls": [TOOL]}, {"reasoning": None, "tool_calls": [TOOL]}),
    ({"content": None}, {"content": None, "reasoning": None}),  # a tool call too many
    ({"reasoning": "b"}, None), ({"reasoning": None}, None), ({"content": ""}, None), ({}, None),
    ({"content": None, "reasoning": "b"}, None), ({"content": "", "reasoning": ""}, None), ({"tool_calls": []}, None),
])  # fmt: skip
def test_what_is_left_of_an_event(delta: dict[str, Any], seen: dict[str, Any] | None) -> None:
    """The end is always sent."""
    events = [chat_start([1]), thought(delta), thought({}, finish="stop"), "[DONE]"]
    got, outcomes = stream(CHAT, events, ASKED)
    middle = [] if seen is None else [dump(shown(seen))]
    assert [dump(item) for item in got[1:-2]] == middle, "key by key, in the engine's order"
    assert got[0] == chat_start(None)
    assert ids_of(outcomes) == [(5, 5)]
    got, outcomes = stream(CHAT, [chat_start([1]), thought(delta, finish="stop"), "[DONE]"], ASKED)
    assert got == [chat_start(None), shown(seen or {}, finish="stop"), "[DONE]"]
    assert ids_of(outcomes) == [(5,)]


def whole(reasoning: Any, **choice: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "a"} | ({} if reasoning is ... else {"reasoning": reasoning})
    return {"id": "x", "model": "m", "choices": [{"index": 0, "message": said, **choice}], "prompt_token_ids": None}


@pytest.mark.parametrize("reasoning", ["b", None, ...])
def test_a_document(reasoning: Any) -> None:
    rows = {"content": [{"logprob": -0.5}]}
    body = whole(reasoning, logprobs=rows, finish_reason="stop", token_ids=[5]) | {"prompt_token_ids": [1]}
    seen, outcomes = document(CHAT, body, ASKED)
    left = reasoning if reasoning is ... else None
    assert seen.decode() == dump(whole(left, logprobs=None, finish_reason="stop", token_ids=None))
    assert ids_of(outcomes) == [(5,)]


def test_another_engine_is_left_alone() -> None:
    """One that has no ids has none of vLLM's ways either."""
    def foreign(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    events = [*map(foreign, ({"role": "assistant"}, {"reasoning": "b"}, {})), foreign({"content": "a"}, "stop")]
    assert stream(CHAT, events, ASKED)[0] == events
    body = whole("b", finish_reason="stop")
    assert document(CHAT, body, ASKED)[0].decode() == dump(body)


@pytest.mark.parametrize("delta", [-1, "x", [1], None, True])
def test_an_event_of_no_known_form_is_put_back_all_the_same(delta: Any) -> None:
    odd = {"index": 0, "delta": delta, "logprobs": {"content": []}, "finish_reason": None, "token_ids": [5]}
    seen, outcomes = stream(CHAT, [{"choices": [odd]}], {"include_reasoning": False})
    assert seen == [{"choices": [odd | {"logprobs": None, "token_ids": None}]}]
    assert reasons(outcomes) == ["capture_failed"]
