"""How the HTTP front is set up from the configuration: alike in the daemon's own process and in each of its workers."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ajet_proxy.core.identity.keys import Keys
from ajet_proxy.io.capture.pipeline import FrontSettings
from ajet_proxy.io.http.aiohttp_internals import MAX_HEADER, Runner
from ajet_proxy.io.http.errors import error_middleware, http_logger, refuse_foreign_pages
from ajet_proxy.settings import Config

BACKLOG = 4096


def application(config: Config, keys: Keys, *around: Any) -> web.Application:
    """An application without routes; `around` are middlewares around all others."""
    guards = [refuse_foreign_pages(_own_names(config))] if keys.is_open else []
    return web.Application(middlewares=[*around, error_middleware, *guards], client_max_size=config.max_body)


def runner(config: Config, served: web.Application) -> Runner:
    """What serves an application, with the limits of `config`. aiohttp waits twice for the shutdown's time: for the
    handlers, and for them once more after it has cut off their requests' bodies."""
    return Runner(
        served, handler_cancellation=True, access_log=None, shutdown_timeout=config.drain_s / 2,
        max_line_size=MAX_HEADER, max_field_size=MAX_HEADER, keepalive_timeout=300.0, logger=http_logger,
    )


def settings(config: Config, daemon: str) -> FrontSettings:
    """Those of the front of the `daemon` of this name."""
    return FrontSettings(
        daemon=daemon, allow_routes=config.allow_route, upstream_key=config.upstream_key,
        read_timeout=config.read_timeout, max_body=config.max_body, continuity=config.continuity == "auto",
        pauses=config.gate_mode == "pause",
    )


def _own_names(config: Config) -> tuple[str, ...] | None:
    """What callers may call us besides our address; a trusted front answers for the names it has."""
    if config.trusted_front:
        return None
    name = urlsplit(config.public_url or "").hostname
    return () if name is None else (name,)
