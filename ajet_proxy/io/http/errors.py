"""The one place where an error becomes an HTTP answer.

Handlers raise `AjetError`s; this middleware gives each its status and the JSON body that OpenAI clients expect, or
Anthropic's where theirs ask. An exception that is none of ours is a defect: it is logged with its traceback, and the
caller learns only that it happened.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from ajet_proxy.core.identity.keys import masked
from ajet_proxy.core.identity.ladder import split_path
from ajet_proxy.core.protocol.anthropic.errors import body_of, speaks_anthropic
from ajet_proxy.io.http.body import ACCEPTED
from ajet_proxy.settings import is_address, is_loopback
from ajet_sdk.errors import AjetError, BadRequest, Forbidden, NotFound

logger = logging.getLogger(__name__)


def _discreet(record: logging.LogRecord) -> bool:
    """A malformed request is its sender's problem: one line, without its text, which may hold a key."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError):
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
    return True


http_logger = logging.getLogger("ajet_proxy.http")
"""The log of aiohttp's server."""
http_logger.addFilter(_discreet)

MAX_URL = 300
"""Of a scheme, a host's name, which has 253, and a port."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(path: str, error: AjetError, status: int | None = None, **more: str) -> web.Response:
    """`error` as the answer to a request for `path`; ``Retry-After`` in whole seconds where the error carries one. A
    `status` that no error has, and the headers that go with it, are given."""
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 415:
        headers["Accept-Encoding"] = ACCEPTED
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = body_of(error) if speaks_anthropic(split_path(path)[1]) else error.to_body()
    text = masked(json.dumps(body))
    return web.json_response(text=text, status=status or error.status, headers=headers)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with what `handler` raises. An answer already begun cannot be changed; its connection is closed."""
    try:
        return await handler(request)
    except AjetError as error:
        _break_off(request)
        return error_response(request.path, error)
    except web.RequestPayloadError:
        broken = BadRequest("the request body cannot be read: its framing or its encoding is broken", code="bad_body")
        return error_response(request.path, broken)
    except web.HTTPNotFound:
        return error_response(request.path, NotFound(f"no route {request.method} {request.path}", code="unknown_route"))
    except web.HTTPMethodNotAllowed as error:
        refused = BadRequest(f"{request.method} does not work on {request.path}", code="method_not_allowed")
        return error_response(request.path, refused, 405, Allow=error.headers["Allow"])
    except web.HTTPException:
        raise
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=499)  # goes nowhere: the client went away, which is its affair and no defect
    except Exception:
        logger.exception("unexpected error in %s %s", request.method, masked(split_path(request.path)[1]))
        _break_off(request)
        defect = AjetError("the proxy failed unexpectedly; its log says why", code="internal_error")
        return error_response(request.path, defect)


def without_websocket(http: web.Request) -> web.Response | None:
    """The answer to a request for a WebSocket: 426, at which Codex goes over to HTTP at once. None to any other."""
    asked = ",".join(http.headers.getall("Upgrade", ())).lower().split(",")
    if not any(protocol.strip().partition("/")[0] == "websocket" for protocol in asked):
        return None
    wanted = BadRequest("WebSockets are not carried here; ask by plain HTTP", code="no_websockets")
    return error_response(http.path, wanted, 426, Upgrade="HTTP/1.1")


def _break_off(request: web.Request) -> None:
    """Close the connection if an answer has begun, so that nothing follows it."""
    if request.writer.output_size and request.transport is not None:
        request.transport.close()


def refuse_foreign_pages(names: Collection[str] | None) -> Any:
    """A middleware: where no key is needed, a web page of another site must not use its visitor's browser to reach us.

    Browsers say in ``Origin`` which site a page is from; only pages of this machine may. They leave it out when a page
    reads from its own site. The owner of a site's name can let that name mean this machine (DNS rebinding). So a
    request must also call us by an address, ``localhost`` or one of `names` (None: by any name).
    """

    @lru_cache(maxsize=1000)
    def calls_us(host: str) -> bool:
        named = host_of(f"http://{host}").lower()
        is_local = named == "localhost" or named.endswith(".localhost")
        return names is None or is_local or named in names or is_address(named)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin, host = request.headers.get("Origin"), request.headers.get("Host")
        if origin is not None and not is_loopback(host_of(origin)):
            raise Forbidden(
                f"requests from pages of {origin[:100]} need a key: set AJET_ADMIN_SECRET", code="foreign_origin"
            )
        if host and not calls_us(host):
            raise Forbidden(
                f"the daemon is not known as {host[:100]}. If it should be, start it with "
                f"AJET_PUBLIC_URL=http://{host[:100]}, or with an AJET_ADMIN_SECRET and any name. Or ask its address",
                code="foreign_host",
            )
        return await handler(request)

    return guard


def host_of(url: str) -> str:
    """The host in `url`, as names go over the wire; empty if there is none, or if `url` has more than `MAX_URL`
    characters, which take long."""
    try:
        return URL(url).raw_host or "" if len(url) <= MAX_URL else ""
    except ValueError:
        return ""
