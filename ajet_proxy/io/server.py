"""aiohttp's server, whose answers to what is no HTTP have the contract's shape.

A request line or header that its parser refuses never reaches the application, so the one place where errors become
answers (`errors`) does not see it. The connection asks that place instead. What was sent is not repeated in the answer:
it may hold a key.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from ajet_proxy.io.errors import error_response
from ajet_sdk.errors import AjetError, BadRequest


class Runner(web.AppRunner):
    """Serves an application, as `web.AppRunner` does."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation,
            loop=made._loop, **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # it logs, and raises where an answer has begun
        answer = error_response(request.path, _error(exc))
        answer.force_close()
        return answer


def _error(error: BaseException | None) -> AjetError:
    if isinstance(error, LineTooLong):
        return BadRequest("the request line or a header is longer than allowed", code="header_too_large")
    if isinstance(error, HttpProcessingError):
        return BadRequest("the request is not HTTP/1.1 as it should be", code="bad_http")
    return AjetError("the proxy failed unexpectedly; its log says why", code="internal_error")
