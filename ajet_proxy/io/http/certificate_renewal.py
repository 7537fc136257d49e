"""Certificates that are renewed while the daemon runs: a handshake uses what their files hold at that moment.

Whoever renews a certificate replaces files, of which certificate and key are two. Python's TLS asks a callback at the
beginning of each handshake (``SSLContext.sni_callback``), which may put another context in place of the listener's.

Invariant: a context comes into use as a whole or not at all. Files that do not go together, as between the replacing of
the two, leave the earlier context in use until they change again, and the log says so.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence

from ajet_proxy.io.runtime.file_versions import file_versions
from ajet_sdk.settings import ConfigError

logger = logging.getLogger(__name__)


def renewed(make: Callable[[], ssl.SSLContext], files: Sequence[str]) -> ssl.SSLContext:
    """A context to listen with, whose handshakes are those of what `make` makes of `files` by then. What is wrong with
    them now is `make`'s `ConfigError`."""
    seen = file_versions(files)
    listening = current = make()

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal seen, current
        if (now := file_versions(files)) != seen:
            seen = now
            try:
                current = make()
            except ConfigError as error:
                logger.error("the certificate stays as it was: %s", error)
            else:
                logger.info("took up the changed certificate %s", files[0])
        connection.context = current

    listening.sni_callback = choose
    return listening
