"""A client's request: what it names, and that a change of fields changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.dialects.request import Request
from ajet_sdk.errors import BadRequest


def test_a_byte_order_mark_does_no_harm() -> None:
    assert Request(b"\xef\xbb\xbf" + b'{"model":"m"}').model == "m"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])
def test_every_encoding_of_json_is_read_and_utf_8_is_sent(encoding: str) -> None:
    request = Request('{"model":"é"}'.encode(encoding))
    assert request.model == "é"
    assert request.text == '{"model":"é"}'
    assert request.with_fields({"n": "1"}) == '{"model":"é","n":1}'.encode()


def test_half_a_character_is_passed_on_for_the_engine_to_refuse() -> None:
    body = b'{"prompt":"\xed\xa0\x80"}'
    assert Request(body).with_fields({}) == body


@pytest.mark.parametrize("model", [None, 7, "\ud800", "m" * 1001])
def test_what_cannot_name_a_model_names_none(model: Any) -> None:
    assert Request(json.dumps({"model": model}).encode()).model == ""


@pytest.mark.parametrize(("body", "code"), [
    (b"", "not_json"), (b"[]", "not_json"), (b'{"a":', "not_json"), (b"{}{}", "not_json"),
    (b'{"a":' + b"[" * 100_000, "not_json"), (b'{"a":' + b"9" * 5000 + b"}", "not_json"),
    (b'{"a":"\xff"}', "not_utf8"), (b"\xff\xfe{", "not_utf8"),
])  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Request(body)
    assert caught.value.code == code


# --- streams


def test_its_fields() -> None:
    assert Request(b'{"a": [1, {"b": null}]}').fields == {"a": [1, {"b": None}]}


def test_fields_are_set_where_they_stand() -> None:
    assert Request(b'{ "a" : 1.50, "b":2 }').with_fields({"b": "3", "c": "null"}) == b'{ "a" : 1.50, "b":3 ,"c":null}'


def test_a_request_is_made_one_for_another_model_only_where_it_is_none() -> None:
    asked = Request(b'{"model": "m"}')
    assert (asked.naming(None), asked.naming("m"), asked.naming('"o')) == ({}, {}, {"model": '"\\"o"'})
