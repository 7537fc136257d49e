"""Certificates of clients: who may be asked for one, whose it is, and which routes demand it.

With `tls_client_ca` the front asks every client for a certificate, takes a connection without one, and ends one whose
certificate is not of that CA. So agents go on without, on the same port, while the routes of scope ``trainer`` demand
one, besides the key: a stolen key alone closes no gate and takes no batch.

Invariant: `subject` is a name that the CA has signed, or None. What is refused in the handshake is said in the log,
because asyncio tells nobody of it.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from ajet_sdk.errors import Forbidden

logger = logging.getLogger(__name__)

SUBJECT = web.RequestKey("certificate", str)
"""The subject of the certificate that a worker process was shown."""
SHORT = {
    "commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C",
    "localityName": "L", "stateOrProvinceName": "ST", "domainComponent": "DC", "userId": "UID",
}  # fmt: skip


def ask_clients(context: ssl.SSLContext, ca_file: str) -> None:
    """Have `context` ask clients for a certificate of the CA in `ca_file` (PEM); `OSError` if that is none."""
    context.load_verify_locations(cafile=ca_file)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.sslobject_class = _Outspoken


def subject(http: web.BaseRequest) -> str | None:
    """Whose certificate the client showed, such as ``CN=trainer,O=Example``; None if it showed none."""
    if SUBJECT in http:
        return http[SUBJECT]
    shown = http.get_extra_info("peercert")
    return _name(shown) if shown else None


def demand(http: web.BaseRequest) -> None:
    """`Forbidden` for a client that showed no certificate."""
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
