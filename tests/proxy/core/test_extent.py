"""How much a request may be made of: counted exactly, and looked at only where it can be too much."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core import extent
from ajet_proxy.core.extent import EACH, check
from ajet_sdk.errors import TooLarge

USER = {"role": "user", "content": "hello"}
MOST = 10
json_values = st.recursive(
    st.none() | st.integers() | st.text("{[\"\\é"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=3),
    max_leaves=40,
)


def refused(fields: dict[str, Any], *, ascii_only: bool = True) -> str | None:
    """What the refusal is about, or None."""
    try:
        check(json.dumps(fields, ensure_ascii=ascii_only), fields, MOST)
    except TooLarge as error:
        return f"{error.status} {error.code}: {error.message}"
    return None


@pytest.mark.parametrize("name", ["messages", "input"])
def test_so_many_messages_or_items_and_no_more(name: str) -> None:
    assert refused({name: [USER] * MOST}) is None
    said = refused({name: [USER] * (MOST + 1)})
    assert said is not None and said.startswith("413 too_many_messages: ")
    assert f"{name} has 11 entries, and may have 10" in said


@pytest.mark.parametrize("fields", [{}, {"messages": "x"}, {"messages": None}, {"prompt": list(range(1000))}])
def test_what_is_no_list_of_messages_is_not_counted_as_one(fields: dict[str, Any]) -> None:
    assert refused(fields) is None


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(count, inner))


@given(value=json_values, ascii_only=st.booleans())
def test_all_objects_and_lists_count_wherever_they_are(value: Any, ascii_only: bool) -> None:
    fields = {"tools": value, "more": [[]] * 30}
    assert (refused(fields, ascii_only=ascii_only) is not None) == (count(fields) > EACH * MOST)


@pytest.mark.parametrize(("written", "too_many"), [
    (json.dumps([{"a": []}] * 20), False), (json.dumps([{"a": []}] * 40), True), ("[" * 60, True), ("no json", False),
    ({"a": [[]] * 20}, False),
])  # fmt: skip
@pytest.mark.parametrize("escaped", [False, True])
def test_what_the_arguments_of_calls_hold_counts(written: Any, too_many: bool, escaped: bool) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    fields = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    text = json.dumps(fields)
    if escaped and isinstance(written, str):
        text = text.replace(json.dumps(written), json.dumps(written).replace("[", "\\u005b").replace("{", "\\u007b"))
    try:
        check(text, fields, MOST)
    except TooLarge:
        assert too_many
    else:
        assert not too_many


def test_texts_may_hold_as_many_brackets_as_they_like() -> None:
    assert refused({"messages": [{"role": "user", "content": "{[" * 1000}]}) is None


def test_a_request_that_cannot_be_too_large_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent, "_holds_more", None)
    assert refused({"messages": [USER] * MOST, "tools": [{}] * 30}) is None


def test_looking_ends_where_it_is_too_much() -> None:
    """However many there are."""
    seen = []

    class Noticed(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            seen.append(name)
            return super().get(name, default)

    fields = {"tools": [Noticed() for _ in range(100_000)]}
    assert refused(fields) is not None
    assert not seen
