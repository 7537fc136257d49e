"""The part of a response's items and tools that shapes its prompt."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.responses.history import spoken
from ajet_proxy.core.protocol.responses.outline import functions, is_unfinished, kinds
from tests.proxy.core.protocol.responses.test_items import CALL, RESULT, TEXT, THOUGHT, USER


@pytest.mark.parametrize(
    ("items", "unfinished"),
    [
        ([], False),
        (["hello"], False),
        ([USER], False),
        ([{**TEXT, "status": "incomplete"}, USER], False),
        ([{**TEXT, "status": "incomplete"}], True),
        ([{"role": "user", "content": "a", "status": "in_progress"}], True),
        ([{**THOUGHT, "status": "in_progress"}], True),
        ([{**RESULT, "status": "in_progress"}], False),
    ],
)
def test_an_unfinished_last_item_would_be_gone_on_with(items: list[Any], unfinished: bool) -> None:
    assert is_unfinished(items) is unfinished


def kinds_of(*items: Any) -> list[Any]:
    found = spoken(items)
    assert found is not None
    return kinds(found)


def test_the_kinds_of_a_longer_conversation_are_those_of_a_shorter_one() -> None:
    turn = (USER, THOUGHT, CALL, RESULT, TEXT)
    assert kinds_of(*turn) == kinds_of(*turn, *turn)
    assert kinds_of(USER, CALL, CALL, CALL) == kinds_of(USER, CALL, CALL)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([USER], [{**USER, "role": "developer"}]),
        ([USER], [{**USER, "content": [{"type": "text", "text": "hello"}]}]),
        ([USER], [{**USER, "content": ""}]),
        ([THOUGHT, TEXT], [TEXT, THOUGHT]),
        ([TEXT], [TEXT, CALL]),
        ([USER], [USER, RESULT]),
    ],
)
def test_what_may_be_rendered_otherwise_is_of_another_kind(one: list[Any], other: list[Any]) -> None:
    assert kinds_of(*one) != kinds_of(*other)


GUESS = {"type": "function", "name": "guess", "description": "d", "parameters": {"type": "object"}, "more": 1}
TOLD = {"name": "guess", "description": "d", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (None, []),
        ([], []),
        ([GUESS], [{"type": "function", "function": TOLD}]),
        ([{**GUESS, "strict": False}], [{"type": "function", "function": TOLD | {"strict": False}}]),
        ([{**GUESS, "strict": None}, {"type": "web_search"}], [{"type": "function", "function": TOLD}]),
        ([{"type": "namespace", "name": "games", "tools": [GUESS, {"type": "custom", "name": "x"}]}],
         [{"type": "function", "function": TOLD | {"name": "games__guess"}}]),
        ("guess", None),
        (["guess"], None),
        ([{"type": "namespace", "name": "games"}], None),
        ([{"type": "namespace", "name": "games", "tools": ["guess"]}], None),
    ],
)  # fmt: skip
def test_the_functions_among_tools(tools: Any, expected: Any) -> None:
    assert functions(tools) == expected
