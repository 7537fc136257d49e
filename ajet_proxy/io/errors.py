"""The one place where an error becomes an HTTP answer.

Handlers raise `AjetError`s; this middleware gives each its status and the JSON body that OpenAI clients expect. An
exception that is none of ours is a defect: it is logged with its traceback, and the caller learns only that it
happened.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from aiohttp import web
from yarl import URL

from ajet_proxy.config import is_loopback
from ajet_sdk.errors import AjetError, BadRequest, Forbidden, NotFound, TooLarge

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(error: AjetError) -> web.Response:
    """`error` as an answer; ``Retry-After`` in whole seconds where the error carries one."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.to_body(), status=error.status, headers=headers)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with what `handler` raises. An answer already begun cannot be changed; its connection is closed."""
    try:
        return await handler(request)
    except AjetError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge as error:
        return error_response(TooLarge(f"the request body is over the limit: {error.text}", code="body_too_large"))
    except web.HTTPNotFound:
        return error_response(NotFound(f"no route {request.method} {request.path}", code="unknown_route"))
    except web.HTTPMethodNotAllowed as error:
        refused = BadRequest(f"{request.method} does not work on {request.path}", code="method_not_allowed")
        answer = error_response(refused)
        answer.set_status(405)
        answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except web.HTTPException:
        raise
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("unexpected error in %s %s", request.method, request.path)
        return error_response(AjetError("the proxy failed unexpectedly; its log says why", code="internal_error"))


@web.middleware
async def refuse_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Where no key is needed, a web page of another site must not use its visitor's browser to reach us.

    Browsers say in ``Origin`` which site a page is from; only pages of this machine may.
    """
    origin = request.headers.get("Origin")
    if origin is not None and not is_loopback(_host_of(origin)):
        raise Forbidden(
            f"requests from pages of {origin[:100]} need a key: set AJET_ADMIN_SECRET", code="foreign_origin"
        )
    return await handler(request)


def _host_of(origin: str) -> str:
    try:
        return URL(origin).host or ""
    except ValueError:
        return ""
