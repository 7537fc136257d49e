"""The limits of what a request is made of: counted exactly, and looked at only where it can be too much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol import request as extent
from ajet_proxy.core.protocol.request import EACH
from ajet_proxy.io.capture.front import MAX_MESSAGES
from ajet_sdk.errors import TooLarge

USER = {"role": "user", "content": "hello"}
MOST = 10
json_values = st.recursive(
    st.none() | st.integers() | st.text("{[\"\\é"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=3),
    max_leaves=40,
)


def told(text: str, most: int = MOST, entries: str = "messages") -> str | None:
    """Tell what is said of a request `text`, if it is refused."""
    try:
        extent.JsonBody(text.encode("utf-8", "surrogatepass"), most).check_size(entries)
    except TooLarge as error:
        return f"{error.status} {error.code}: {error.message}"
    return None


def refused(fields: dict[str, Any], *, ascii_only: bool = True) -> str | None:
    """The words of the refusal, or None."""
    return told(json.dumps(fields, ensure_ascii=ascii_only))


@pytest.mark.parametrize("name", ["messages", "input"])
def test_so_many_messages_or_items_and_no_more(name: str) -> None:
    assert told(json.dumps({name: [USER] * MOST}), entries=name) is None
    said = told(json.dumps({name: [USER] * (MOST + 1)}), entries=name)
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
    assert (told(text) is not None) == too_many


def test_texts_may_hold_as_many_brackets_as_they_like() -> None:
    assert refused({"messages": [{"role": "user", "content": "{[:," * 1000 + '\\" \\\\'}]}) is None


def names(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(names, value.values()))
    return sum(map(names, value)) if isinstance(value, list) else 0


def values(value: Any) -> int:
    inner = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return sum(map(values, inner)) + max(1, len(inner)) if isinstance(value, dict | list) else 0


@given(value=json_values, most=st.integers(1, 30), limit=st.sampled_from(["EACH", "NAMES", "VALUES"]))
def test_names_and_values_count_wherever_they_are(value: Any, most: int, limit: str) -> None:
    """An empty object or list counts as if it had one value. What is written in strings does not count."""
    fields, limits = {"tools": value}, {"EACH": 10**6, "NAMES": 10**6, "VALUES": 10**6, limit: 1}
    found = {"EACH": count, "NAMES": names, "VALUES": values}[limit](fields)
    with pytest.MonkeyPatch.context() as patch:
        for name, each in limits.items():
            patch.setattr(extent, name, each)
        for text in (json.dumps(fields), json.dumps(fields, ensure_ascii=False, indent=1)):
            assert (told(text, most) is not None) == (found > most)


def bare(text: str) -> str:
    return "".join(piece for piece, _ in extent.bare(text))


@given(value=json_values, piece=st.integers(1, 12))
def test_pieces_make_no_difference(value: Any, piece: int) -> None:
    """Not even those that end within an escape."""
    text = json.dumps({"a": {"b,": [1, ":", {"c\\": '"\\\\"'}]}, "d": "[", "e": value})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extent, "PIECE", piece)
        assert bare(text) == re.sub(r'"(\\.|[^"\\])*"', "", text)


def copied(text: str, work: Callable[[str], object]) -> int:
    """Characters of all the texts that `work` makes of `text` and of its parts."""
    made = 0

    def noted(part: str) -> str:
        nonlocal made
        made += len(part)
        return Noted(part) if part else part

    class Noted(str):
        __slots__ = ()

        def __getitem__(self, where: Any) -> str:
            return noted(str(self)[where])

        def __radd__(self, before: str) -> str:
            return noted(before + str(self))

        def replace(self, *what: Any, **_: Any) -> str:
            return noted(str(self).replace(*what))

        def split(self, *by: Any, **_: Any) -> list[str]:
            return list(map(noted, str(self).split(*by)))

    work(Noted(text))
    return made


@pytest.mark.parametrize("signs", ["\"", "\\\""], ids=["quotes", "escaped quotes"])
def test_work_on_quotes_grows_with_their_number_and_no_faster(signs: str) -> None:
    text = '{"a":"' + "," * 2_000_001 + '","' + signs * 3_000_000
    assert copied(text, lambda noted: extent.count((noted,), MAX_MESSAGES)) < 5 * len(text)


def test_more_quotes_than_names_and_values_could_have_are_too_much() -> None:
    """It is seen later if it is JSON, and that costs more. Those in texts do not count."""
    text = '{"a":"' + "," * 2001 + '","' + '"' * 4700
    assert "the body holds more than 4700 quotes" in str(told(text))
    assert refused({"messages": [{"role": "user", "content": ("," + '"' * 10) * 2001}]}) is None
    call = {"function": {"name": "f", "arguments": '"' + "," * 2001 + '"' * 4700}}
    said = refused({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert "the body holds more than 4700 quotes" in str(said)


@given(value=json_values, written=st.lists(json_values, max_size=4))
def test_no_json_within_the_other_limits_has_too_many_quotes(value: Any, written: list[Any]) -> None:
    fields = {"tools": value, "more": [{"arguments": json.dumps(one)} for one in written]}
    whole = [fields, *written]
    with pytest.MonkeyPatch.context() as patch:
        for name, found in {"EACH": count, "NAMES": names, "VALUES": values}.items():
            patch.setattr(extent, name, sum(map(found, whole)))
        assert told(json.dumps(fields), 1) is None


@pytest.mark.parametrize("written", [
    json.dumps({str(name): 0 for name in range(301)}), json.dumps({str(name): 0 for name in range(301)})[:-1],
    json.dumps([0] * 2001), {f"n{name}": 0 for name in range(301)},
])  # fmt: skip
@pytest.mark.parametrize("escaped", [False, True])
def test_names_and_values_in_the_arguments_of_calls_count(written: Any, escaped: bool) -> None:
    fields = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": written}}]}]}
    text = json.dumps(fields)
    if escaped and isinstance(written, str):
        text = text.replace(json.dumps(written), json.dumps(written).replace(":", "\\u003a").replace(",", "\\u002c"))
        assert json.loads(text) == fields
    assert told(text) is not None
    assert refused({"messages": [{"role": "assistant", "content": json.dumps(written)}]}) is None


def test_a_request_that_cannot_be_too_large_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent, "bare", None)
    assert refused({"messages": [USER] * MOST, "tools": [{}] * 30}) is None


def test_taking_apart_ends_where_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is."""
    pieces = []

    def seen(text: str) -> Iterator[tuple[str, int]]:
        for piece in apart(text):
            pieces.append(piece)
            yield piece

    apart = extent.bare
    monkeypatch.setattr(extent, "PIECE", 1000)
    monkeypatch.setattr(extent, "bare", seen)
    text = json.dumps({"tools": {str(name): name for name in range(100_000)}})
    assert "the body holds more than 300 names" in str(told(text))
    assert len(pieces) == text.index('"299"') // 1000 + 1


def test_a_text_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls' arguments are counted to what it is made of."""
    apart = []
    bare = extent.bare
    monkeypatch.setattr(extent, "bare", lambda text: apart.append(text) or bare(text))
    call = {"function": {"name": "f", "arguments": json.dumps("," * 3000)}}
    fields = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    text = json.dumps(fields)
    assert told(text) is None
    assert apart == [text, json.dumps("," * 3000)]


CHAT = {"model": "m", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {f"p{place}": {"type": "string", "description": "x: y, z"} for place in range(30)},
}}}  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"path": "p", "text": "a"})}}


@pytest.mark.parametrize("asked", [
    CHAT | {"logit_bias": {str(token): -100 for token in range(262_144)}},
    {"model": "m", "prompt": list(range(1_000_000))},
    {"model": "m", "prompt": [list(range(8_000)) for _ in range(128)]},
    CHAT | {"tools": [TOOL] * 500},
    CHAT | {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}] * 3000},
    CHAT | {"messages": [{"role": "user", "content": "a: b, [c]; {d}\n" * 1_000_000}]},
    CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "A" * 10_000_000}}]}]},
], ids=["bias", "a million ids", "128 prompts", "500 tools", "turns", "long", "image"])  # fmt: skip
def test_what_an_engine_can_read_passes_with_the_defaults(asked: dict[str, Any]) -> None:
    assert told(json.dumps(asked), MAX_MESSAGES) is None


@pytest.mark.parametrize("asked", [
    {f"k{name}": 0 for name in range(400_000)}, {"metadata": {f"k{name}": 0 for name in range(400_000)}},
    {"prompt": [0] * 2_100_000}, {"tools": [{}] * 60_000}, {"prompt": ["a"] * 2_100_000},
], ids=["fields", "names", "ids", "objects", "texts"])  # fmt: skip
def test_what_is_too_much_for_the_defaults(asked: dict[str, Any]) -> None:
    assert told(json.dumps(asked), MAX_MESSAGES) is not None


def test_a_request_that_was_read_within_limits_knows_whether_it_keeps_to_all_of_them() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 60}}
    for fields in ({"messages": [USER] * (MOST + 1)}, {"messages": [{"role": "assistant", "tool_calls": [call]}]}):
        text = json.dumps(fields)
        assert told(text) is not None and told(text, 100) is None
        extent.JsonBody(text.encode()).check_size("messages")
