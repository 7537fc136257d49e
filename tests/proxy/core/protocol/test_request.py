"""A client's request: what it names, and that a change of fields changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol import request
from ajet_proxy.core.protocol.request import Request
from ajet_sdk.errors import BadRequest, TooLarge


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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("asked", [{"metadata": {str(name): 0 for name in range(31)}}, {"prompt": [0] * 201}])
def test_too_much_json_is_refused_before_it_is_read(
    encoding: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (" \n" + json.dumps(asked)).encode(encoding)
    assert Request(body).fields == Request(body, 2).fields == asked
    monkeypatch.setattr(request, "scan", None)
    with pytest.raises(TooLarge) as caught:
        Request(body, 1)
    assert caught.value.code == "too_many_messages"


def test_a_body_has_so_many_fields_and_no_more() -> None:
    """Each costs more than a name further in."""
    fields = {str(name): 0 for name in range(6)}
    assert Request(json.dumps(fields).encode(), 2).fields == fields
    with pytest.raises(TooLarge, match="more than 5 fields"):
        Request(json.dumps(fields).encode(), 1)


def test_what_is_no_json_object_is_not_counted() -> None:
    """It is passed on as it is."""
    for body in (b"a,b,c\n" * 1000, b"[0" + b",0" * 1000 + b"]"):
        with pytest.raises(BadRequest):
            Request(body, 1)


# --- streams


def test_its_fields() -> None:
    assert Request(b'{"a": [1, {"b": null}]}').fields == {"a": [1, {"b": None}]}


def test_fields_are_set_where_they_stand() -> None:
    assert Request(b'{ "a" : 1.50, "b":2 }').with_fields({"b": "3", "c": "null"}) == b'{ "a" : 1.50, "b":3 ,"c":null}'


def test_a_request_is_made_one_for_another_model_only_where_it_is_none() -> None:
    asked = Request(b'{"model": "m"}')
    assert (asked.naming(None), asked.naming("m"), asked.naming('"o')) == ({}, {}, {"model": '"\\"o"'})
