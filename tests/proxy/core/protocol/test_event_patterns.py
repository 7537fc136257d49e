"""The patterns match JSON, and nothing but JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.reading import IDS, NUMBER, STRING, is_utf8


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


@pytest.mark.parametrize(("raw", "expected"), [(b"a", True), ("é".encode(), True), (b"\xff", False)])
def test_utf8(raw: bytes, expected: bool) -> None:
    assert is_utf8(raw) == expected
