"""How the HTTP front is set up from the configuration: alike in the daemon's own process and in each of its workers."""

from __future__ import annotations

import ssl
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ajet_proxy.core.identity.keys import Keys
from ajet_proxy.io.capture.front import FrontSettings
from ajet_proxy.io.http import client_certificates
from ajet_proxy.io.http.certificate_renewal import renewed
from ajet_proxy.io.http.errors import error_middleware, http_logger, refuse_foreign_pages
from ajet_proxy.io.http.server import MAX_HEADER, Runner
from ajet_proxy.settings import Config
from ajet_sdk.settings import ConfigError

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


def tls(config: Config) -> ssl.SSLContext | None:
    """What the front's connections are secured with, if they are: the files of `config` as they are at the time."""
    if config.tls_cert is None:
        return None
    files = [file for file in (config.tls_cert, config.tls_key, config.tls_client_ca) if file is not None]
    return renewed(partial(_context, config), files)


def _context(config: Config) -> ssl.SSLContext:
    assert config.tls_cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use tls_cert {config.tls_cert} with tls_key {config.tls_key}: {error}") from error
    if config.tls_client_ca is not None:
        try:
            client_certificates.ask_clients(context, config.tls_client_ca)
        except OSError as error:
            raise ConfigError(f"cannot use tls_client_ca {config.tls_client_ca}: {error}") from error
    return context


def _passphrase() -> str:
    raise OSError("the key is encrypted, and nobody can type a passphrase; give one without a passphrase")


def _own_names(config: Config) -> tuple[str, ...] | None:
    """What callers may call us besides our address; a trusted front answers for the names it has."""
    if config.trusted_front:
        return None
    name = urlsplit(config.public_url or "").hostname
    return () if name is None else (name,)
