"""Errors in Anthropic's shape: which routes have them, and which type each status has."""

from __future__ import annotations

import pytest

from ajet_proxy.core.protocol.anthropic.errors import body_of, speaks_anthropic
from ajet_sdk.errors import AjetError, EngineTimeout, NotReady, TooLarge, Unauthorized


@pytest.mark.parametrize(("path", "expected"), [
    ("/v1/messages", True), ("/v1/messages/", True), ("/v1/messages/count_tokens", True), ("/v1/messagesx", False),
    ("/v1/chat/completions", False), ("/ajet/v1/episodes", False),
])  # fmt: skip
def test_the_routes_of_anthropics_clients(path: str, expected: bool) -> None:
    assert speaks_anthropic(path) is expected


@pytest.mark.parametrize(("error", "kind"), [
    (Unauthorized("no"), "authentication_error"), (TooLarge("no"), "request_too_large"),
    (NotReady("no"), "overloaded_error"), (EngineTimeout("no"), "timeout_error"), (AjetError("no"), "api_error"),
])  # fmt: skip
def test_each_status_has_the_documented_type(error: AjetError, kind: str) -> None:
    assert body_of(error) == {"type": "error", "error": {"type": kind, "message": "no"}}
