"""Chat completions: what is asked for, where it is found, what goes back to what it would have been."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.chat import CHAT as DIALECT
from ajet_proxy.core.protocol.dialect import Ask
from tests.proxy.core.protocol.answers import CHAT, chat_event, chat_start, reasons, stream

IDS = {"return_token_ids": "true"}
LOGPROBS = {"logprobs": "true"}


@pytest.mark.parametrize(("request_", "fields", "hidden"), [
    ({}, IDS | LOGPROBS, (True, True)),
    ({"return_token_ids": None, "logprobs": None, "top_logprobs": 0}, IDS | LOGPROBS, (True, True)),
    ({"return_token_ids": False, "logprobs": False}, IDS | LOGPROBS, (True, True)),
    ({"return_token_ids": True}, LOGPROBS, (False, True)),
    ({"logprobs": True}, IDS, (True, False)),
    ({"logprobs": True, "top_logprobs": 5, "return_token_ids": True}, {}, (False, False)),
    ({"logprobs": True, "top_logprobs": None}, IDS | {"top_logprobs": "0"}, (True, True)),
    ({"top_logprobs": None}, IDS | LOGPROBS | {"top_logprobs": "0"}, (True, True)),
    ({"logprobs": True, "top_logprobs": None, "logprob_token_ids": [1]}, IDS, (True, False)),
    ({"return_token_ids": "yes", "logprobs": 1}, {}, (False, False)),
    ({"return_token_ids": "no", "logprobs": "off", "top_logprobs": 2}, IDS | LOGPROBS, (True, True)),
    # the engine refuses these, and must go on refusing them
    ({"top_logprobs": 5}, IDS, (True, False)),
    ({"top_logprobs": -1, "logprobs": False}, IDS, (True, False)),
    ({"logprob_token_ids": [1]}, IDS, (True, False)),
    ({"return_token_ids": "2"}, LOGPROBS, (True, True)),
    ({"logprobs": [], "top_logprobs": None}, IDS | {"top_logprobs": "0"}, (True, True)),
])  # fmt: skip
def test_what_the_engine_is_asked(request_: dict[str, Any], fields: dict[str, str], hidden: tuple[bool, bool]) -> None:
    ask = DIALECT.ask(request_)
    assert ask.fields == fields
    assert (ask.hide_ids, ask.hide_logprobs) == hidden
    assert (ask.choices, ask.skip) == (1, None)


@pytest.mark.parametrize("asked", [{}, {"logprobs": True, "return_token_ids": True}])
def test_without_reasoning_the_engine_is_asked_for_it(asked: dict[str, Any]) -> None:
    ask = DIALECT.ask({"include_reasoning": False, **asked})
    expected = {"include_reasoning": "true"} | ({} if asked else IDS | LOGPROBS)
    assert ask.fields == expected
    assert (ask.hide_ids, ask.hide_logprobs, ask.hide_reasoning, ask.show_prompt) == (True, True, True, bool(asked))
    assert not DIALECT.ask({"include_reasoning": True, **asked}).hide_reasoning


@pytest.mark.parametrize(("n", "choices"), [(1, 1), (3, 3), (None, 1), (0, 1), (-1, 1), ("2", 2), (True, 1), (2.0, 2)])
def test_how_many_choices_come(n: Any, choices: int) -> None:
    assert DIALECT.ask({"n": n}).choices == choices


def test_what_cannot_be_captured_goes_out_as_it_is() -> None:
    assert DIALECT.ask({"use_beam_search": True}) == Ask(skip="beam_search")


def message(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "text"}, {"role": "user", "content": list(parts)}]}


def test_a_prompt_that_is_more_than_text_is_not_captured() -> None:
    text = {"type": "text", "text": "a"}
    for part in ({"type": "image_url", "image_url": {}}, {"type": "input_audio"}, {"type": None}, {"image_url": "x"}):
        assert DIALECT.ask(message(text, part)).skip == "multimodal"
    for request in (message(text, {"type": "refusal"}, {"text": "a"}, "a"), {"messages": [None, 7]}, {"messages": "a"}):
        assert DIALECT.ask(request).skip is None


@pytest.mark.parametrize("asked", [{}, {"echo": True}])
def test_its_own_words_come_back_to_an_agent_that_asks_for_them(asked: dict[str, Any]) -> None:
    echoed = chat_event({"content": "hel"})
    del echoed["choices"][0]["token_ids"]
    end = chat_event({"content": "lo"}, ids=[5], logprobs=[-0.5], finish="stop")
    seen, outcomes = stream(CHAT, [chat_start([1]), echoed, end, "[DONE]"], asked)
    assert seen == [chat_start(None), echoed, chat_event({"content": "lo"}, finish="stop"), "[DONE]"]
    assert reasons(outcomes) == (["captured"] if asked else ["no_token_ids"])
