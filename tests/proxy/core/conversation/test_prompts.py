"""What an episode's task is derived from."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.conversation.history import CHAT, COMPLETIONS, RESPONSES
from ajet_proxy.core.conversation.prompts import PROBE, SHORT, begins, is_probe, is_short, prompt_digest

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(("fields", "probe"), [
    ({}, False), ({"max_tokens": PROBE}, True), ({"max_tokens": PROBE + 1}, False), ({"max_output_tokens": 1}, True),
    ({"max_completion_tokens": 500, "max_tokens": 1}, False), ({"max_tokens": 1, "tools": [{}]}, False),
    ({"max_tokens": "1"}, False),
])  # fmt: skip
def test_a_probe_allows_few_tokens_and_no_tools(fields: dict[str, Any], probe: bool) -> None:
    assert is_probe(fields) == probe


@pytest.mark.parametrize(("fields", "first"), [
    ({"messages": [HELLO]}, True), ({"messages": [HELLO, ANSWER, HELLO]}, False), ({"prompt": "hello"}, True),
    ({"input": "hello"}, True), ({"input": [HELLO, {"type": "reasoning"}]}, False), ({"messages": ["odd"]}, True),
    ({"input": "more", "previous_response_id": "resp"}, False), ({"messages": 7}, True),
])  # fmt: skip
def test_a_conversation_begins_without_an_answer(fields: dict[str, Any], first: bool) -> None:
    assert begins(fields) == first


def test_what_is_short_may_be_read_again() -> None:
    assert is_short({"prompt": "x" * 9999}) and is_short({"messages": [HELLO] * SHORT})
    assert not is_short({"messages": [HELLO] * (SHORT + 1)})


def test_the_digest_is_of_the_words_alone() -> None:
    one = prompt_digest(CHAT, {"messages": [HELLO], "seed": 1})
    assert len(one) == 24 and one == prompt_digest(CHAT, {"messages": [HELLO], "model": "m"})
    assert one != prompt_digest(CHAT, {"messages": [ANSWER]})
    assert len({one, prompt_digest(COMPLETIONS, {"prompt": "hello"}), prompt_digest(RESPONSES, {"input": "bye"})}) == 3
    assert prompt_digest(CHAT, {"messages": 7}) == prompt_digest(CHAT, {"messages": []}) == ""
