"""Which certificates a program must trust to be intercepted: the machine's own and the interceptor's CA.

Most programs *replace* their trust store by the file that a variable names, so that file must hold both: the
connections that are not intercepted meet the certificates of their true hosts.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from ajet_sdk.errors import NotFound

TRUST_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
USUAL = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/cert.pem",  # macOS
)


def bundle(ca: bytes, environ: Mapping[str, str]) -> bytes:
    """The certificates (PEM) that programs with `environ` trust already, and `ca`."""
    return system_certificates(environ).rstrip(b"\n") + b"\n" + ca


def system_certificates(environ: Mapping[str, str]) -> bytes:
    """What `environ` says to trust, else the machine's bundle, else certifi's; `NotFound` where there is none."""
    paths = ssl.get_default_verify_paths()
    named = [environ.get(name) for name in TRUST_VARIABLES]
    for candidate in (*named, paths.cafile, paths.openssl_cafile, *USUAL):
        if candidate and os.path.isfile(candidate):
            return Path(candidate).read_bytes()
    try:
        import certifi
    except ImportError:
        raise NotFound("this machine has no file of trusted certificates: name one in SSL_CERT_FILE") from None
    return Path(certifi.where()).read_bytes()
