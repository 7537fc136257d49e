"""The interceptor's certificate authority on disk: who may read it, how long it holds, and what programs must trust.

mitmproxy makes the authority once, in a directory of its own. A reader of its key can stand in for any host that a
program of ours believes in. So before each start the key must be its owner's alone. One that others can read is
refused and not quietly repaired: only the operator can know whether somebody has read it.

Invariant: nothing but the public certificate ever leaves the directory.
"""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

from ajet_sdk.interception import bundle

KEY = "mitmproxy-ca.pem"
PRIVATE = (KEY, "mitmproxy-ca.p12")
"""The files that hold the authority's key."""
CERTIFICATE = "mitmproxy-ca-cert.pem"
BUNDLE = "ca-bundle.pem"


class AuthorityError(Exception):
    """An authority that must not be used; the message is one line and says what to do."""


def prepare(directory: Path) -> None:
    """Make `directory` for its owner alone, or raise `AuthorityError` if what is there is open to others."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for fault in exposed(directory):
        raise AuthorityError(
            f"{fault}: if nobody can have used that, take the permission away (chmod); else delete {directory}, "
            "and let programs trust the new CA"
        )


def exposed(directory: Path) -> list[str]:
    """The faults in the permissions of an authority, each in words."""
    faults = []
    if directory.is_symlink() or _mode(directory) & 0o022 or _owner(directory) not in (0, os.geteuid()):
        faults.append(f"others can write to {directory}")
    return faults + [
        f"others can read the CA's key in {path}" for path in (directory / name for name in PRIVATE)
        if path.is_symlink() or (path.exists() and (_mode(path) & 0o077 or _owner(path) != os.geteuid()))
    ]


def certificate(directory: Path) -> bytes:
    """The public certificate (PEM)."""
    return (directory / CERTIFICATE).read_bytes()


def write_bundle(directory: Path) -> Path:
    """A file with the system's certificates and ours, for programs whose trust store is replaced and not added to."""
    path = directory / BUNDLE
    partial = path.with_suffix(".partial")
    partial.write_bytes(bundle(certificate(directory)))
    partial.replace(path)
    return path


def lifetime(directory: Path) -> tuple[datetime.datetime, datetime.datetime]:
    """From when until when the authority's certificate is valid; `ValueError` if the file holds none."""
    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate(directory))
    return found.not_valid_before_utc, found.not_valid_after_utc


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def _owner(path: Path) -> int:
    return path.lstat().st_uid
