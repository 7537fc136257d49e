"""The trainer's side of TLS: whom it trusts, what it shows, and what a failed handshake means in words.

A connection that was refused for its certificates is refused again, so it is not tried again; what the other side or
the library said is turned into the option that mends it. Some proxies, ajet's among them, say nothing: asyncio's TLS
hangs up on a certificate that it does not accept without telling why. So a few hang-ups in a row on one who shows a
certificate count as a refusal too; a proxy that is starting again refuses connections in between.
"""

from __future__ import annotations

import ssl

import httpx

from ajet_sdk.errors import ProxyUnreachable
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import Config


class TlsRefused(ProxyUnreachable):
    """One side does not accept the other's certificate, or one of them speaks no TLS."""


def context(config: Config) -> ssl.SSLContext | None:
    """What `config` says of TLS; None where no daemon speaks it. Raises `ConfigError` for files that cannot be used."""
    if not any(url.startswith("https:") for url in config.proxy_url):
        return None
    try:
        made = httpx.create_ssl_context()
    except OSError as error:
        raise ConfigError(f"the file that SSL_CERT_FILE names cannot be used: {error}", param="SSL_CERT_FILE") from None
    try:
        if config.tls_cert:
            made.load_cert_chain(config.tls_cert, password="")  # never ask at the terminal
    except OSError as error:
        said = f"cannot use tls_cert {config.tls_cert}, which holds the certificate and its key: {error}"
        raise ConfigError(said, param="tls_cert") from None
    return made


HANG_UPS = 3


class Judge:
    """Reads the failures of one request to `url`, in order. `certified` says whether we show a certificate."""

    def __init__(self, url: str, certified: bool) -> None:
        self._url, self._certified, self._hang_ups = url, certified, 0

    def refused(self, error: httpx.TransportError) -> TlsRefused | None:
        """What `error` says about certificates, with those before it; None when it says nothing of them."""
        found = refusal(self._url, error)
        hung_up = self._certified and isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError))
        self._hang_ups = self._hang_ups + 1 if hung_up else 0
        if found is None and self._hang_ups == HANG_UPS:
            return TlsRefused(
                f"{self._url} hangs up on us, as proxies do on a certificate that they do not accept: "
                "tls_cert must be of the proxy's tls_client_ca, and hold today (the proxy's log says more)"
            )
        return found


def refusal(url: str, error: httpx.TransportError) -> TlsRefused | None:
    """`error` as what it says about certificates; None when it says nothing of them."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    reason = cause.reason or ""
    if isinstance(cause, ssl.SSLCertVerificationError) and "mismatch" in cause.verify_message:
        return TlsRefused(f"the certificate of {url} is for other names ({cause.verify_message}): use one in proxy_url")
    if isinstance(cause, ssl.SSLCertVerificationError):
        advice = "name the file of its CA in SSL_CERT_FILE"
        return TlsRefused(f"the certificate of {url} is not trusted ({cause.verify_message}): {advice}")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        said = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return TlsRefused(f"{url} refuses our certificate ({said}): tls_cert must be of the proxy's tls_client_ca")
    if reason == "WRONG_VERSION_NUMBER":
        return TlsRefused(f"{url} speaks no TLS: write http:// for it")
    return None
