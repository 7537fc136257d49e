"""JSON read with places: the values are the standard library's, and only what is exchanged changes.

The patterns match JSON, and nothing but JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.json_edits import (
    IDS,
    NUMBER,
    STRING,
    Spanned,
    is_utf8,
    load,
    scan,
    scan_at,
    scan_list,
    splice,
    with_fields,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=6)
DEEP = st.dictionaries(st.text(max_size=6), JSON, max_size=4).map(lambda found: {"k": 1, **found})
WRITTEN = st.sampled_from(({"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}, {}))


def plain(value: Any) -> Any:
    if isinstance(value, Spanned):
        return {name: plain(item) for name, item in value.values.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@given(OBJECTS, WRITTEN)
def test_values_and_places(body: dict[str, Any], how: dict[str, Any]) -> None:
    text = f" {json.dumps(body, **how)}\n"
    found = scan(text)
    assert found.values == json.loads(text)
    for name, (start, end) in found.spans.items():
        assert json.loads(text[start:end]) == found.values[name]
    assert text[found.end] == "}"


@given(DEEP, st.lists(DEEP, max_size=3), WRITTEN)
def test_objects_in_the_deep_list(body: dict[str, Any], items: list[dict[str, Any]], how: dict[str, Any]) -> None:
    text = json.dumps({**body, "choices": items}, **how)
    found = scan(text, deep="choices")
    assert plain(found) == plain(load(text, deep="choices")) == json.loads(text)
    for item in found.values["choices"]:
        start, end = item.spans["k"]
        assert json.loads(text[start:end]) == item.values["k"]


@given(OBJECTS, WRITTEN)
def test_fields_are_set_and_the_rest_stays(body: dict[str, Any], how: dict[str, Any]) -> None:
    text = json.dumps(body, **how)
    known = next(iter(body), None)
    fields = {"\u0000new": "[1]"} | ({known: '"set"'} if known is not None else {})
    changed = json.loads(with_fields(text, json.loads(text), fields))
    assert changed == {**json.loads(text), **{name: json.loads(value) for name, value in fields.items()}}
    assert list(changed) == [*body, "\u0000new"]


def test_a_deep_key_that_holds_no_list_stays_plain() -> None:
    assert scan('{"choices":{"a":1}}', deep="choices").values == {"choices": {"a": 1}}
    assert scan('{"choices":[ ]}', deep="choices").values == {"choices": []}
    assert plain(scan('{"choices":[{"a":1} , {}] }', deep="choices")) == {"choices": [{"a": 1}, {}]}


def test_objects_inside_are_found_in_their_place() -> None:
    text = '{"a":[1],"b": [ {"c":2} , {"d":{"e":null}} ], "f":{}}x'
    found = scan_at(text, 0)
    items, end = scan_list(text, found.spans["b"][0])
    assert text.startswith(', "f"', end)
    assert [plain(item) for item in items] == [{"c": 2}, {"d": {"e": None}}]
    start, end = scan_at(text, items[1].spans["d"][0]).spans["e"]
    assert text[start:end] == "null"
    assert scan_list(" []", 1) == ([], 3)
    for name in ("a", "f"):
        with pytest.raises(ValueError):
            scan_list(text, found.spans[name][0])


def test_a_name_may_be_written_with_escapes() -> None:
    found = scan('{ "\\u0061" : 1,"\\"":2}')
    assert found.values == {"a": 1, '"': 2}
    assert found.spans == {"a": (13, 14), '"': (20, 21)}
    with pytest.raises(ValueError):
        scan('{"\\u0061" 1}')


def test_the_last_of_two_equal_names_counts() -> None:
    found = scan('{"a":1,"a":22}')
    assert found.values == {"a": 22}
    assert found.spans == {"a": (11, 13)}
    assert load('{"a":1,"a":22}', deep="a") == ({"a": 22}, {}, -1)


def test_splice_takes_edits_in_any_order() -> None:
    assert splice("0123456789", {(6, 8): "b", (1, 3): "aaa", (9, 9): "+"}) == "0aaa345b8+9"


@pytest.mark.parametrize("text", [
    "", "[]", "1", '"a"', "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', "{a:1}", '{"a" 1}', '{"a":1 "b":2}',
    '{"a":tru}', "{} x", '{"choices":[1]}', '{"choices":[{}', '{"choices":[{} {}]}', '{"choices":[{},]}',
    '{"choices":[', '{"a":"\n"}',
])  # fmt: skip
def test_anything_else_is_an_error(text: str) -> None:
    for read in (scan, load):
        with pytest.raises(ValueError):
            read(text, deep="choices")


def test_nesting_without_end_is_an_error() -> None:
    with pytest.raises(RecursionError):
        scan('{"a":' + "[" * 200_000)


# --- test event patterns


@given(st.text(), st.booleans())
def test_every_string_is_matched_however_it_is_written(text: str, escaped: bool) -> None:
    raw = json.dumps(text, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    assert re.fullmatch(STRING, raw)


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_matched(number: float) -> None:
    assert re.fullmatch(NUMBER, json.dumps(number).encode())


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_every_list_of_ids_is_matched(ids: list[int]) -> None:
    assert re.fullmatch(IDS, json.dumps(ids, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("pattern", "raw"),
    [(STRING, b'"a'), (STRING, b'"\\x"'), (STRING, b'"\\u12"'), (STRING, b'"\n"'), (STRING, b'"a"b"'), (NUMBER, b"01"),
     (NUMBER, b"1."), (NUMBER, b"-"), (NUMBER, b"1e"), (NUMBER, b"NaN"), (IDS, b"[]"), (IDS, b"[1,]"), (IDS, b"[-1]")],
)  # fmt: skip
def test_what_is_no_json_is_not(pattern: bytes, raw: bytes) -> None:
    assert not re.fullmatch(pattern, raw)


@given(st.binary() | st.text(st.characters(exclude_categories=["Cs"])).map(str.encode))
def test_utf8_is_what_decodes(raw: bytes) -> None:
    def decodes() -> Any:
        try:
            return raw.decode() is not None
        except UnicodeDecodeError:
            return False

    assert is_utf8(raw) == decodes()
