"""The environment in which a program that hard-codes its provider's address is intercepted: ``ajet run --intercept``.

The program gets the address of the daemon's HTTPS proxy, with the key of its episode in it, and the certificates to
trust. It gets no base URL, not even one that this process has: what it does is what it would do at its provider's.
Nothing of this machine changes: no trust store, no setting of anybody else's.

Clients disagree on the variable in which they look for certificates, so all are set. Most *replace* their trust store
by the file that a variable names. So that file holds the machine's own certificates and the daemon's CA: connections
that are not intercepted meet the certificates of their true hosts.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ajet_sdk.blocking import Client
from ajet_sdk.errors import NotFound

TRUST_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
USUAL = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/cert.pem",  # macOS
)
BASE_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL")
BY_THEMSELVES = ("transparent", "local")
"""Kinds of interception to which a program comes without knowing of a proxy."""
REPLACED = (*TRUST_VARIABLES, "DENO_CERT")
NODE_PRELOAD = Path(__file__).with_name("intercepted.cjs")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Interception:
    """The interception of a program.

    `url` is the HTTPS proxy (None: connections are caught without one), `hosts` are those whose requests are captured,
    `home` is the daemon's host. `ca` is the file with the daemon's CA, `trusted` the one with all certificates.
    """

    url: str | None
    hosts: tuple[str, ...]
    home: str
    ca: Path
    trusted: Path

    def environment(self, env: Mapping[str, str], key: str) -> dict[str, str]:
        """`env` for the program of the episode whose key is `key`."""
        out = {name: value for name, value in env.items() if name not in BASE_URLS}
        out |= dict.fromkeys(REPLACED, str(self.trusted))
        out["NODE_EXTRA_CA_CERTS"] = str(self.ca)
        out["NO_PROXY"] = out["no_proxy"] = self._direct(env)
        if self.url is not None:
            parts = urlsplit(self.url)
            named = f"{quote(key, safe='')}:x"  # Python's urllib shows no name without a password
            out["HTTPS_PROXY"] = out["https_proxy"] = f"{parts.scheme}://{named}@{parts.netloc}"
            preload = str(NODE_PRELOAD).replace("\\", "\\\\").replace('"', '\\"')
            out["NODE_OPTIONS"] = f'{env.get("NODE_OPTIONS", "")} --require="{preload}"'.strip()
        return out

    def _direct(self, env: Mapping[str, str]) -> str:
        """The hosts without a proxy: the daemon, this machine, and those before. Hosts to intercept are among them only
        where no proxy of ours is: on the way through another, no firewall sees where a connection goes."""
        before = (env.get("no_proxy") or env.get("NO_PROXY") or "").split(",")
        kept = [entry for entry in map(str.strip, before) if entry and (self.url is None or not self._covers(entry))]
        listed = self.hosts if self.url is None else ()
        return ",".join(dict.fromkeys((*LOOPBACK, self.home, *listed, *kept)))

    def _covers(self, entry: str) -> bool:
        """True if an entry of NO_PROXY would let a listed host go its own way."""
        domain = entry.lower().partition(":")[0].lstrip("*.")
        return any(host == domain or host.endswith(f".{domain}") or not domain for host in self.hosts)


@contextmanager
def intercepting(client: Client) -> Iterator[Interception]:
    """Asks `client`'s daemon for its interception; its certificates are there as long as the context is open.

    `NotFound` if it does not intercept, or only in ways that a program's environment cannot lead to.
    """
    certificate = client.ask("ca").content
    known: dict[str, Any] = client.ask("status").json()["intercept"]
    url, kinds = known["url"], [mode["kind"] for mode in known["modes"]]
    if url is None and not set(kinds) & set(BY_THEMSELVES):
        raise NotFound(f"this proxy intercepts as {' and '.join(kinds)} only: start it with --intercept HOST:PORT too")
    with tempfile.TemporaryDirectory(prefix="ajet-") as folder:
        ca, trusted = Path(folder, "ca.pem"), Path(folder, "trusted.pem")
        ca.write_bytes(certificate)
        trusted.write_bytes(bundle(certificate))
        for path, mode in ((ca, 0o644), (trusted, 0o644), (Path(folder), 0o755)):
            path.chmod(mode)  # the program may run as another user, by whom a firewall knows it
        home = urlsplit(client.target.url).hostname or ""
        yield Interception(url, tuple(known["hosts"]), home, ca, trusted)


def bundle(ca: bytes) -> bytes:
    """The certificates (PEM) that programs trust already, and `ca`, once. Those are the ones that the environment
    names, else the machine's, else certifi's; `NotFound` if there are none."""
    paths = ssl.get_default_verify_paths()
    named = [os.environ.get(name) for name in TRUST_VARIABLES]
    candidates = (*named, paths.cafile, paths.openssl_cafile, *USUAL)
    found = next((one for one in candidates if one and os.path.isfile(one)), None)
    if found is None:
        try:
            import certifi
        except ImportError:
            raise NotFound("this machine has no file of trusted certificates: name one in SSL_CERT_FILE") from None
        found = certifi.where()
    known = Path(found).read_bytes()
    return known if ca.strip() in known else known.rstrip(b"\n") + b"\n" + ca
