"""Who is at the other end of each connection that the interceptor hands to the HTTP front.

mitmproxy ends the TLS and relays bytes; the front sees a connection from this machine. Between the two stands this map
from source address and port to caller: a machine has more addresses than one, and each has all ports. It is filled when
a connection to the front is made, before a byte runs over it.

An intercepted program has no base URL of ours, and the key it sends is its provider's. So its episode is named by the
key in its proxy's address (``HTTPS_PROXY=http://KEY@HOST:PORT``), which takes the place of the provider's.

Invariants: no credential for a provider gets past `Tunnels.headers`, neither to the engine nor onto the disk. The
listener answers only connections that the interceptor made, and only requests to listed hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from ajet_proxy.core.identity.headers import Headers
from ajet_proxy.core.identity.keys import Claims, check_scope, proxy_key_in
from ajet_proxy.io.engines.upstream import as_written, keys_in
from ajet_proxy.io.http.errors import Handler, error_response, host_of, without_websocket
from ajet_proxy.settings import Mode
from ajet_sdk.bodies import KEY_PREFIX
from ajet_sdk.errors import AjetError, Forbidden

PROVIDER_CREDENTIALS = frozenset((
    "authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "openai-organization", "openai-project",
))
"""Headers that say who somebody is to a provider."""
REALM = 'Basic realm="ajet"'
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Interception:
    """The ways in which programs are intercepted: the listed hosts, the modes that are on, each at its real address,
    and the CA's public certificate (PEM)."""

    hosts: tuple[str, ...]
    listening: tuple[Mode, ...]
    certificate: bytes

    def to_json(self, asked: str | None) -> dict[str, Any]:
        """The part that `status` shows. Modes that listen everywhere are shown at `asked`, the host that the caller
        named."""
        modes: list[dict[str, Any]] = []
        url = None
        for mode in self.listening:
            modes.append({"kind": mode.kind})
            if mode.address is not None:
                host, port = mode.address
                host = asked if asked and host in ("0.0.0.0", "::") else host
                modes[-1] |= {"host": host, "port": port}
                if mode.kind == "regular" and url is None:
                    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return {"url": url, "hosts": list(self.hosts), "modes": modes}


@dataclass(frozen=True, slots=True)
class Caller:
    """A program whose connection was intercepted: the key in its proxy's address, and whether that was checked."""

    key: str | None
    admitted: bool


class Tunnels:
    """Whose connection comes from where. `hosts` are listed; with `needs_key`, each caller must show a key."""

    def __init__(
        self, hosts: Collection[str], *, authenticate: Callable[[str | None], Claims], needs_key: bool
    ) -> None:
        self.hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self.needs_key = needs_key
        self._authenticate = authenticate
        self._callers: dict[Address, Caller] = {}

    def lists(self, host: str) -> bool:
        """True if requests to `host` are captured."""
        return host.lower().rstrip(".") in self.hosts

    def open(self, source: Address, caller: Caller) -> None:
        """The connection to the front from `source` carries what `caller` sends."""
        self._callers[source] = caller

    def close(self, source: Address, caller: Caller) -> None:
        """The connection is gone; its source may already be another caller's."""
        if self._callers.get(source) is caller:
            del self._callers[source]

    def refusal(self, key: str | None) -> str | None:
        """Why a caller with this key in its proxy's address may not use the interceptor; None if it may."""
        if key is None:
            return "this proxy needs a key: give it as http://KEY@HOST:PORT" if self.needs_key else None
        try:
            check_scope(self._authenticate(key), "agent")
        except AjetError as error:
            return error.message
        return None

    def headers(self, http: web.Request) -> Headers:
        """The request's headers, with the caller's key for us in place of what was meant for its provider."""
        out = CIMultiDict(
            (name, value) for name, value in as_written(http.raw_headers).items()
            if name.lower() not in PROVIDER_CREDENTIALS or _is_ours(name, value)
        )
        key = self._key(http)
        if key is not None and not any(name.lower() in PROVIDER_CREDENTIALS for name in out):
            out["Authorization"] = f"Bearer {key}"
        return Headers(out)

    def guard(self) -> Any:
        """A middleware that lets in only what the interceptor relays to a listed host."""

        @web.middleware
        async def guarded(http: web.Request, handler: Handler) -> web.StreamResponse:
            caller = self._caller(http)
            if caller is None:
                raise Forbidden("only the interceptor connects here", code="not_intercepted")
            refusal = None if caller.admitted else self.refusal(self._key(http))
            if refusal is not None:
                wanted = Forbidden(refusal, code="proxy_authentication_required")
                return error_response(http.path, wanted, 407, Proxy_Authenticate=REALM)
            host = host_of(f"http://{http.host}")
            if not self.lists(host):
                raise Forbidden(
                    f"requests to {host[:100]} are not carried, only those to {', '.join(sorted(self.hosts))}; for the "
                    "tunnels to other hosts set HTTPS_PROXY only, not HTTP_PROXY", code="foreign_host",
                )
            return without_websocket(http) or await handler(http)

        return guarded

    def _caller(self, http: web.Request) -> Caller | None:
        peer = http.transport.get_extra_info("peername") if http.transport is not None else None
        return self._callers.get(peer[:2]) if peer else None

    def _key(self, http: web.Request) -> str | None:
        """The key in the address of the caller's proxy: a tunnel sends it once, plain HTTP with each request."""
        caller = self._caller(http)
        sent = proxy_key_in(http.headers.get("Proxy-Authorization"))
        return caller.key if caller is not None and caller.key is not None else sent


def _is_ours(name: str, value: str) -> bool:
    return name.lower() in ("authorization", "x-api-key") and any(key.startswith(KEY_PREFIX) for key in keys_in(value))
