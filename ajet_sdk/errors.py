"""Every error that crosses a boundary of ajet, each with the HTTP status that carries it.

::

    AjetError
    ├── BadRequest        400  malformed input; ``param`` names the offending field.
    ├── Unauthorized      401  no key, or a key that is forged or expired.
    ├── Forbidden         403  a good key of the wrong scope, or another's episode.
    ├── NotFound          404  no such episode, call, batch or route.
    ├── Conflict          409  the thing exists, but its state does not allow this.
    ├── TooLarge          413  a body or frame over its configured limit.
    ├── UnsupportedMedia  415  a body that is packed in a way which is not read.
    ├── OverQuota         429  a tenant's limit is reached; ``retry_after`` says when to come back.
    ├── EngineError       502  the inference engine answered nonsense or could not be reached.
    ├── NotReady          503  the proxy cannot take this now; ``retry_after`` says when to come back.
    ├── EngineTimeout     504  the inference engine did not answer in time.
    ├── LoopDetected      508  an engine of the proxy leads back to it.
    └── ProxyUnreachable   —   raised by clients only: no proxy answered before the deadline.

The body on the wire is what OpenAI clients expect (https://platform.openai.com/docs/guides/error-codes):
``{"error": {"message", "type", "code", "param"}}``.
"""

from __future__ import annotations

from typing import Any, ClassVar


class AjetError(Exception):
    """Base of the tree. ``code`` is a short machine-readable word; ``param`` the field at fault, if one is."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1
    """The exit code of a command that fails by it."""

    def __init_subclass__(cls, *, status: int | None = None, type: str | None = None) -> None:
        """Without a `status` and a `type` of its own, an error has those of its base."""
        cls.status, cls.type = status or cls.status, type or cls.type

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def to_body(self) -> dict[str, Any]:
        """The JSON body of the HTTP answer."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}


class BadRequest(AjetError, status=400, type="invalid_request_error"): ...
class Unauthorized(AjetError, status=401, type="authentication_error"): ...
class Forbidden(AjetError, status=403, type="permission_error"): ...
class NotFound(AjetError, status=404, type="not_found_error"): ...
class Conflict(AjetError, status=409, type="conflict_error"): ...
class TooLarge(AjetError, status=413, type="invalid_request_error"): ...
class UnsupportedMedia(AjetError, status=415, type="invalid_request_error"): ...
class OverQuota(AjetError, status=429, type="rate_limit_error"): ...
class EngineError(AjetError, status=502, type="engine_error"): ...
class NotReady(AjetError, status=503, type="not_ready_error"): ...
class EngineTimeout(AjetError, status=504, type="engine_error"): ...
class LoopDetected(AjetError, status=508, type="engine_error"): ...


_KINDS: list[type[AjetError]] = AjetError.__subclasses__()
"""The errors that a proxy answers with: `ProxyUnreachable` comes after them."""
_TYPES = {AjetError.type} | {kind.type for kind in _KINDS}
_ELSEWHERE = (200, 301, 302, 307, 308, 404, 405)
"""Answers of other servers to a control route."""
_BY_STATUS = {kind.status: kind for kind in _KINDS}
SENT_BADLY = (400, 411, 413, 414, 415, 422, 431)
"""The statuses that an engine answers to a request that is wrong by itself. With any other error status it is the
engine that is."""


class ProxyUnreachable(AjetError, status=503, type="proxy_unreachable"): ...


def from_body(status: int, body: Any, *, retry_after: float | None = None) -> AjetError:
    """The error that an answer with this status and (decoded) body stands for; never raises."""
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        detail = {"message": f"HTTP {status}: {str(body)[:200]}"}
    cls = _BY_STATUS.get(status, AjetError)
    code, param = detail.get("code"), detail.get("param")
    elsewhere = status in _ELSEWHERE and detail.get("type") not in _TYPES
    hint = " (an ajet proxy does not answer like this: is its address right, and without /v1?)" if elsewhere else ""
    if code == "unknown_route":
        hint = " (is the proxy's address right, and without /ajet?)"
    return cls(
        str(detail.get("message") or f"HTTP {status}") + hint,
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        retry_after=retry_after,
    )
