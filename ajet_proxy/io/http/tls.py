"""TLS where clients come in: certificates that are renewed while the daemon runs, and those that clients show.

A renewal replaces two files: certificate and key. A handshake uses what the files hold at that moment. At its beginning
Python calls ``SSLContext.sni_callback``, which may put another context in place of the listener's.

With `tls_client_ca` the front asks every client for a certificate. It takes a connection without one, and ends one
whose certificate is not of that CA. So agents need none on the same port. The routes of scope ``trainer`` demand one,
besides the key: a stolen key alone closes no gate and takes no batch.

Invariants: a context comes into use as a whole or not at all. Between the two replacements the files do not fit
together: the earlier context stays in use until they do, and the log says so. `subject` is a name that the CA
has signed, or None. What is refused in the handshake is said in the log, because asyncio tells nobody of it.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from ajet_proxy.settings import Config
from ajet_sdk.errors import Forbidden
from ajet_sdk.settings import ConfigError
from ajet_sdk.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

SUBJECT = web.RequestKey("certificate", str)
"""The subject of the certificate that a worker process was shown."""
SHORT = {
    "commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C",
    "localityName": "L", "stateOrProvinceName": "ST", "domainComponent": "DC", "userId": "UID",
}  # fmt: skip


def listening(config: Config) -> ssl.SSLContext | None:
    """The context that secures the front's connections: the files of `config` as they are at each handshake. None
    without TLS."""
    if config.tls_cert is None:
        return None
    named = (config.tls_cert, config.tls_key, config.tls_client_ca)
    files = WatchedFiles("the certificate stays as it was", filter(None, named), logger.error)
    files.take(lambda: None)
    secured = current = context_of(config)

    def choose(connection: ssl.SSLObject, _name: str | None, _context_now: ssl.SSLContext) -> None:
        nonlocal current
        if (changed := files.take(lambda: context_of(config))) is not None:
            current = changed
            logger.info("took up the changed certificate %s", config.tls_cert)
        connection.context = current

    secured.sni_callback = choose
    return secured


def context_of(config: Config) -> ssl.SSLContext:
    """The TLS of a server. `ConfigError` if a file of `config` cannot be read or used."""
    assert config.tls_cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use tls_cert {config.tls_cert} with tls_key {config.tls_key}: {error}") from error
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(cafile=config.tls_client_ca)
        except OSError as error:
            raise ConfigError(f"cannot use tls_client_ca {config.tls_client_ca}: {error}") from error
        context.verify_mode = ssl.CERT_OPTIONAL
        context.sslobject_class = _Outspoken
    return context


def _passphrase() -> str:
    raise OSError("the key is encrypted, and nobody can type a passphrase; give one without a passphrase")


def subject(http: web.BaseRequest) -> str | None:
    """Whose certificate the client showed, such as ``CN=trainer,O=Example``; None if it showed none."""
    if SUBJECT in http:
        return http[SUBJECT]
    shown = http.get_extra_info("peercert")
    return _name(shown) if shown else None


def demand(http: web.BaseRequest) -> None:
    """Raises `Forbidden` for a client that showed no certificate."""
    if subject(http) is None:
        raise Forbidden(
            "this route also needs a client certificate: show one of the CA in the proxy's tls_client_ca "
            "(ajet-trainer: tls_cert and tls_key)", code="client_certificate_required",
        )


def _name(shown: dict[str, Any]) -> str:
    parts: Iterable[tuple[str, str]] = (pair for name in shown.get("subject", ()) for pair in name)
    return ",".join(f"{SHORT.get(kind, kind)}={value}" for kind, value in parts) or f"serial {shown['serialNumber']}"


class _Outspoken(ssl.SSLObject):
    """The server's side of a connection, which says why it refuses a certificate."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLCertVerificationError as error:
            logger.warning("a client was refused for its certificate: %s", error.verify_message)
            raise
