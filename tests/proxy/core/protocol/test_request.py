"""A client's request: what it names, and that a change of fields changes nothing else.

Values as the engine's validation reads them; the table was made with pydantic, which vLLM uses.

What is more than text: by its type, by its key, by its name in the engine's cache.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol import request
from ajet_proxy.core.protocol.request import JsonBody, beyond_text, flag, integer, number, unread
from ajet_sdk.errors import BadRequest, TooLarge


def test_a_byte_order_mark_does_no_harm() -> None:
    assert JsonBody(b"\xef\xbb\xbf" + b'{"model":"m"}').model == "m"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])
def test_every_encoding_of_json_is_read_and_utf_8_is_sent(encoding: str) -> None:
    request = JsonBody('{"model":"é"}'.encode(encoding))
    assert request.model == "é"
    assert request.with_fields({"n": "1"}) == '{"model":"é","n":1}'.encode()


def test_half_a_character_is_passed_on_for_the_engine_to_refuse() -> None:
    body = b'{"prompt":"\xed\xa0\x80"}'
    assert JsonBody(body).with_fields({}) == body


@pytest.mark.parametrize("model", [None, 7, "\ud800", "m" * 1001])
def test_what_cannot_name_a_model_names_none(model: Any) -> None:
    assert JsonBody(json.dumps({"model": model}).encode()).model == ""


@pytest.mark.parametrize(("body", "code"), [
    (b"", "not_json"), (b"[]", "not_json"), (b'{"a":', "not_json"), (b"{}{}", "not_json"),
    (b'{"a":' + b"[" * 100_000, "not_json"), (b'{"a":' + b"9" * 5000 + b"}", "not_json"),
    (b'{"a":"\xff"}', "not_utf8"), (b"\xff\xfe{", "not_utf8"),
])  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        JsonBody(body)
    assert caught.value.code == code


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("asked", [{"metadata": {str(name): 0 for name in range(31)}}, {"prompt": [0] * 201}])
def test_too_much_json_is_refused_before_it_is_read(
    encoding: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (" \n" + json.dumps(asked)).encode(encoding)
    assert JsonBody(body).fields == JsonBody(body, 2).fields == asked
    monkeypatch.setattr(request, "load", None)
    with pytest.raises(TooLarge) as caught:
        JsonBody(body, 1)
    assert caught.value.code == "too_many_messages"


def test_a_body_has_so_many_fields_and_no_more() -> None:
    """Each costs more than a name further in."""
    fields = {str(name): 0 for name in range(6)}
    assert JsonBody(json.dumps(fields).encode(), 2).fields == fields
    with pytest.raises(TooLarge, match="more than 5 fields"):
        JsonBody(json.dumps(fields).encode(), 1)


def test_what_is_no_json_object_is_not_counted() -> None:
    """It is passed on as it is."""
    for body in (b"a,b,c\n" * 1000, b"[0" + b",0" * 1000 + b"]"):
        with pytest.raises(BadRequest):
            JsonBody(body, 1)


# --- streams


def test_fields_are_set_where_they_stand() -> None:
    assert JsonBody(b'{ "a" : 1.50, "b":2 }').with_fields({"b": "3", "c": "null"}) == b'{ "a" : 1.50, "b":3 ,"c":null}'


def test_a_request_is_made_one_for_another_model_only_where_it_is_none() -> None:
    asked = JsonBody(b'{"model": "m"}')
    assert (asked.naming(None), asked.naming("m"), asked.naming('"o')) == ({}, {}, {"model": '"\\"o"'})


# --- test coercion


@pytest.mark.parametrize(("value", "expected"), [
    (True, True), (False, False), (1, True), (0, False), (1.0, True), (0.0, False), (2, None), (1.5, None),
    ("true", True), ("TRUE", True), ("on", True), ("Y", True), ("1", True), ("t", True), ("yes", True),
    ("false", False), ("off", False), ("N", False), ("0", False), ("f", False), ("no", False),
    (" true", None), ("", None), ("1.0", None), ([], None), ({}, None), (None, None), (10**30, None),
])  # fmt: skip
def test_truth_values(value: Any, expected: bool | None) -> None:
    assert flag({"x": value}, "x") is expected
    assert unread({"x": value}, "x") is (expected is None and value is not None)
    assert not unread({}, "x")


@pytest.mark.parametrize(("value", "expected"), [
    (2, 2), (0, 0), (-1, -1), (True, 1), (False, 0), (2.0, 2), (2.5, None), (1e30, None), (float("nan"), None),
    (float("inf"), None), (10**30, 10**30), ("2", 2), (" 2 ", 2), ("+2", 2), ("-2", -2), ("1_0", 10), ("2.0", 2),
    ("02", 2), ("-0", 0), ("2.5", None), ("1__0", None), ("1e3", None), ("0x1", None), ("١", None), ("", None),
    ("1" * 5000, None), ([], None), (None, None),
])  # fmt: skip
def test_whole_numbers(value: Any, expected: int | None) -> None:
    got = integer({"x": value}, "x")
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("value", "expected"), [
    (0.5, 0.5), (2, 2.0), (True, 1.0), ("0.5", 0.5), (" 1e-3 ", 0.001), ("x", None), ("", None), ("1" * 100, None),
    (10**400, None), (float("nan"), None), ("inf", None), ([], None), (None, None),
])  # fmt: skip
def test_numbers(value: Any, expected: float | None) -> None:
    got = number({"x": value}, "x")
    assert got == expected
    assert type(got) is type(expected)


# --- test content parts


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize("content", [
    None, 5, "a", [], ["a"], [TEXT], [TEXT, {"type": "input_text", "text": "a"}], [{"type": "output_text"}],
    [{"text": "a"}], [{"type": "refusal"}], [{"type": "thinking"}], [{"type": "tool_reference"}], [5, None],
])  # fmt: skip
def test_text(content: Any) -> None:
    assert not beyond_text([7, {"content": content, "other": [{}]}], "content")
    assert not beyond_text(content, "content")


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_image"}, {"type": "input_audio"},
    {"type": "video_url"}, {"type": "file"}, {"type": "image_embeds"}, {"type": "prompt_embeds"},
    {"image_url": "x"}, {"type": None, "image_url": "x"}, {"text": "a", "image_url": "x"}, {}, {"type": []},
    {"type": "text", "image_url": "x", "uuid": "kept"},
])  # fmt: skip
def test_more_than_text(part: Any) -> None:
    for content in ([part], [TEXT, part]):
        assert beyond_text([{"content": content}], "content") and beyond_text([{}, {"b": content}], "a", "b")
