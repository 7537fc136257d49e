"""The error tree: every status has its class, and a body read back is the error that wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_sdk import errors

RAISED_ALONE = (errors.AjetError, errors.ProxyUnreachable)


def kinds() -> list[type[errors.AjetError]]:
    found = [errors.AjetError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind not in RAISED_ALONE])
def test_a_body_read_back_is_the_error_that_wrote_it(kind: type[errors.AjetError]) -> None:
    error = kind("what went wrong", code="a_code", param="a_field")
    back = errors.from_body(kind.status, error.to_body(), retry_after=2.5)
    assert type(back) is kind
    assert (back.message, back.code, back.param, back.retry_after) == ("what went wrong", "a_code", "a_field", 2.5)


def test_no_two_wire_errors_share_a_status() -> None:
    statuses = [kind.status for kind in kinds() if kind not in RAISED_ALONE]
    assert sorted(statuses) == [400, 401, 403, 404, 409, 413, 415, 429, 502, 503, 504, 508]


@pytest.mark.parametrize(
    "body",
    [None, [], "text", 3, {}, {"error": None}, {"error": "text"}, {"error": {}}, {"error": {"code": 7, "param": []}}],
)
@pytest.mark.parametrize("status", [302, 404, 418, 500])
def test_any_body_is_some_error(status: int, body: Any) -> None:
    error = errors.from_body(status, body)
    assert type(error) is (errors.NotFound if status == 404 else errors.AjetError)
    assert str(status) in error.message
    assert error.code is None
    assert error.param is None


@pytest.mark.parametrize(
    ("status", "body", "elsewhere"),
    [
        (404, {"detail": "Not Found"}, True),
        (404, {"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}}, True),
        (200, "<html>", True),
        (404, errors.NotFound("no episode x").to_body(), False),
        (405, errors.BadRequest("PUT does not work").to_body(), False),
        (413, "<html>", False),
    ],
)
def test_who_asked_another_server_is_told(status: int, body: Any, elsewhere: bool) -> None:
    assert ("without /v1?" in errors.from_body(status, body).message) is elsewhere


def test_who_asked_for_a_page_of_the_proxys_is_told() -> None:
    body = errors.NotFound("no control route GET /ajet/ajet/v1/status", code="unknown_route").to_body()
    assert errors.from_body(404, body).message.endswith("(is the proxy's address right, and without /ajet?)")


def test_the_tree_is_drawn_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    for kind in kinds():
        assert kind.__name__ in errors.__doc__
