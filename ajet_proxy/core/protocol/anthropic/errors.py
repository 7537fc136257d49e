"""Errors in the words of Anthropic's API: ``{"type": "error", "error": {"type", "message"}}``.

The engine keeps this shape on its own ``/v1/messages``, with names of its own for the type. What the proxy has to say
itself uses the type that Anthropic documents for the status, because their clients show it and decide by it.
"""

from __future__ import annotations

from typing import Any

from ajet_sdk.errors import AjetError

PREFIX = "/v1/messages"
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def speaks_anthropic(path: str) -> bool:
    """Tell whether clients that ask at the engine's route `path` expect errors in this shape."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def error_body(kind: str, message: str) -> dict[str, Any]:
    """An error of type `kind`."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def body_of(error: AjetError) -> dict[str, Any]:
    """The body that an Anthropic client gets for `error`."""
    return error_body(_TYPES.get(error.status, "api_error"), error.message)
