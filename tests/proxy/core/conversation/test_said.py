"""The words of a request: what they are compared with, and what an episode's task is derived from."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.conversation.said import Said
from ajet_proxy.core.protocol.routes import CAPTURED
from tests.kit.steps import own_s
from tests.kit.strategies import nested

USER, MODEL = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def test_the_prompt_is_a_digest_of_the_words_alone_and_the_same_for_everybody() -> None:
    chat, prompt, response = "/v1/chat/completions", "/v1/completions", "/v1/responses"
    one = said(chat, messages=[USER], seed=1).prompt
    assert len(one) == 24 and one == said(chat, b"another client", messages=[USER], model="m").prompt
    assert one == said(response, input="hi").prompt != said(chat, messages=[MODEL]).prompt
    assert len({one, said(prompt, prompt="hi").prompt, said(prompt, prompt=[1]).prompt}) == 3
    assert said(chat, messages=7).prompt == said(chat, messages=[]).prompt == ""


def said(route: str, scope: bytes = b"scope", **fields: Any) -> Said:
    dialect = CAPTURED[route]
    words = {name: fields.get(name) for name in dialect.words}
    return Said(dialect.history(fields, scope, exact=False), words, scope)


@pytest.mark.parametrize(("route", "short", "long", "other"), [
    ("/v1/chat/completions", {"messages": [USER]}, {"messages": [USER, MODEL, USER]}, {"messages": [MODEL, USER]}),
    ("/v1/completions", {"prompt": "hi"}, {"prompt": "hi there"}, {"prompt": "ho there"}),
    ("/v1/completions", {"prompt": [1, 2]}, {"prompt": [1, 2, 3]}, {"prompt": [2, 1, 3]}),
    ("/v1/responses", {"input": "hi"}, {"input": [USER, MODEL, USER]}, {"input": [MODEL, USER]}),
    ("/v1/responses", {"input": "hi", "previous_response_id": "r"},
     {"input": [USER, USER], "previous_response_id": "r"}, {"input": [USER, USER], "previous_response_id": "s"}),
])  # fmt: skip
def test_what_begins_with_what(route: str, short: Any, long: Any, other: Any) -> None:
    first = said(route, **short)
    assert said(route, **long, temperature=0.5, stream=True).begins_with([first.key, "messages:9:none"]) == (first.key,)
    assert said(route, **short).begins_with([first.key]) == (first.key,)
    assert said(route, **other).begins_with([first.key]) == ()
    assert first.begins_with([said(route, **long).key]) == ()


@pytest.mark.parametrize(("route", "fields"), [
    ("/v1/completions", {"prompt": ["one", "two"]}), ("/v1/chat/completions", {"messages": [{"content": "no role"}]}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}], "prompt": [[]] * 3}),
])  # fmt: skip
def test_what_has_no_history_is_known_when_it_comes_again(route: str, fields: Any) -> None:
    key = said(route, **fields).key
    assert said(route, **fields, stream=True).begins_with([key]) == (key,)
    (name,) = CAPTURED[route].words
    assert said(route, **{**fields, name: [*fields[name], "more"]}).begins_with([key]) == ()


@pytest.mark.parametrize("kind", ["text", "ids", "other"])
@pytest.mark.parametrize("prompt", ["x" * 2_000_000, ["x" * 1_000_000] * 2])
def test_with_how_much_it_is_compared_costs_little(kind: str, prompt: Any) -> None:
    keys = [f"{kind}:{1_000_000 + place}:{place:024}" for place in range(1000)]
    once = own_s(lambda: said("/v1/completions", prompt=prompt).key, 3)
    assert own_s(lambda: said("/v1/completions", prompt=prompt).begins_with(keys), 3) < 30 * once


def test_dialects_say_the_same() -> None:
    chat = said("/v1/chat/completions", messages=[USER])
    assert said("/v1/responses", input="hi").key == chat.key
    system = {"role": "system", "content": "be kind"}
    chat = said("/v1/chat/completions", messages=[system, USER])
    assert said("/v1/responses", instructions="be kind", input="hi").key == chat.key


def test_what_is_nested_too_deeply_has_a_key_all_the_same() -> None:
    assert said("/v1/completions", prompt=nested()).key.startswith("other:0:")
