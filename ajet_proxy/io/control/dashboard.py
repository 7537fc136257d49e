"""``/ajet/``: the owner's page, one document that asks the control routes for all it shows.

A browser cannot send a key with an address, and a key in an address would end in histories and logs. So a caller
without a key is answered 401 with the page itself, which holds no data: it asks for a key, keeps it in its own tab and
sends it as a header. A program that takes no HTML gets the usual error.

Invariant: the page is the same for everyone. Its headers forbid other sites to frame it, and it to ask anyone else.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from ajet_proxy.core.identity.keys import Claims, check_scope
from ajet_proxy.io.http.body import unasked
from ajet_sdk.errors import Unauthorized
from ajet_sdk.page import live_page

PATH = "/ajet/"


def add_page(app: web.Application, claims: Callable[[web.Request], Claims]) -> None:
    """Serve the page; `claims` authenticates a request."""
    page, policy = live_page()
    headers = {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def show(http: web.Request) -> web.Response:
        status = 200
        try:
            check_scope(claims(http), "admin")
        except Unauthorized:
            if "text/html" not in http.headers.get("Accept", ""):
                raise
            status = 401
        return web.Response(text=page, status=status, content_type="text/html", headers=headers)

    async def beside(_http: web.Request) -> web.Response:
        return web.Response(status=308, headers={"Location": PATH})

    app.router.add_get(PATH, show, expect_handler=unasked)
    app.router.add_get(PATH.rstrip("/"), beside, expect_handler=unasked)
