"""Keys: what a caller may do, signed so that there is no list of keys anywhere.

A key is ``ajet-PAYLOAD.SIGNATURE``: the claims as base64url JSON and an HMAC-SHA256 over them. Who holds the signing
secret can check a key without a lookup, and an episode's key stays good over a restart of the proxy. Only
``A-Z a-z 0-9 - _ .`` occur, so a key also fits into a URL path.

Invariant: `Keys.verify` returns claims only for the admin secret itself, or for a key that `Keys.issue` made with a
secret of the ring. Such a key must not have expired or been revoked. Comparison is in constant time. No error message
repeats a key; where one must be named, `key_id` does.

The signing secret is random and never derived from the admin secret. Otherwise an agent with a signed key could search
for a guessable admin secret offline.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct, structs

from ajet_sdk.bodies import KEY, KEY_PREFIX
from ajet_sdk.errors import Forbidden, Unauthorized

Scope = Literal["agent", "trainer", "admin", "operator", "judge"]
_SIGNED = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{16,}}+(?=(\.[A-Za-z0-9_-]{{43}})?)")
"""Text that may be a payload, as far as it goes, and perhaps a signature: a hostile text costs no more than its
length."""
KEY_ID = re.compile(r"[0-9a-f]{16}")
"""The form of a `key_id`."""
NO_KEY = "no API key: send one as 'Authorization: Bearer KEY' (ajet: set AJET_API_KEY; ajet-trainer: its `key`)"
SCOPES: tuple[Scope, ...] = ("agent", "trainer", "admin", "operator", "judge")
"""A key says its scope by the place in this list, so it only grows."""


class Claims(Struct, frozen=True):
    """The claims of a key: its scope, its tenant, the one episode it is limited to (None: all of the tenant's), when it
    expires, and when it was issued. Both times are Unix seconds. A trainer's may be limited to one ``model``. A judge's
    reaches what is in its ``lanes``. An agent's may have one: what opens with it is users' traffic there, ``always`` or
    if a request says so."""

    scope: Scope
    tenant: str = ""
    episode: str | None = None
    expires: float = float("inf")
    issued: float = 0.0
    model: str = ""
    lanes: tuple[str, ...] = ()
    always: bool = False


EVERYTHING = Claims(scope="admin")
"""The rights of a request without a key while the proxy listens on loopback and no admin secret is set."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The secrets whose keys are valid, and the keys that are revoked. The newest secret is the first, and it signs.

    ``keys`` are the `key_id`s of single keys. ``tenants`` and ``episodes`` say until when (Unix seconds) the keys
    issued for them are void: those issued later are good.
    """

    secrets: tuple[bytes, ...]
    keys: frozenset[str] = frozenset()
    tenants: Mapping[str, float] = field(default_factory=dict)
    episodes: Mapping[str, float] = field(default_factory=dict)

    def revoked(self, key: str, claims: Claims) -> bool:
        """Tell whether `key`, which says `claims`, is revoked."""
        return (
            claims.issued <= self.tenants.get(claims.tenant, -1.0)
            or (claims.episode is not None and claims.issued <= self.episodes.get(claims.episode, -1.0))
            or bool(self.keys and key_id(key) in self.keys)
        )


class Keys:
    """Issues and checks keys with `ring`, which may be replaced at any time.

    `admin_secret` itself is accepted as an admin key. Without one (`is_open`), a request may do everything if it has no
    key, or a key that was never ours (``EMPTY``, ``sk-…``). What opens with that is users' traffic of the lane
    `traffic`, if there is one. A key of ours is still held to its claims.
    """

    def __init__(self, secret: bytes, *, admin_secret: str | None = None, traffic: str = "") -> None:
        self.ring = Ring((secret,))
        self._without = structs.replace(EVERYTHING, lanes=(traffic,), always=True) if traffic else EVERYTHING
        self._admin_secret = admin_secret
        self.is_open = admin_secret is None

    def issue(self, claims: Claims) -> str:
        """The key that says `claims`."""
        expires = None if claims.expires == float("inf") else claims.expires
        fields = [SCOPES.index(claims.scope), claims.tenant, claims.episode, expires, claims.issued, claims.model]
        fields += [claims.lanes, claims.always] if claims.lanes else []
        payload = _encode(json.dumps(fields, separators=(",", ":")).encode())
        return f"{KEY_PREFIX}{payload}.{_sign(self.ring.secrets[0], payload)}"

    def verify(self, key: str, now: float) -> Claims:
        """The claims of `key` at Unix time `now`; `Unauthorized` if it is forged, expired, revoked or not a key."""
        if self._admin_secret is not None and hmac.compare_digest(_bytes(key), _bytes(self._admin_secret)):
            return EVERYTHING
        payload, dot, signature = key.removeprefix(KEY_PREFIX).partition(".")
        if not key.startswith(KEY_PREFIX) or not dot:
            raise Unauthorized("this API key is not one of this proxy", code="invalid_api_key")
        given, made = _bytes(signature), (_bytes(_sign(secret, payload)) for secret in self.ring.secrets)
        if not any(hmac.compare_digest(given, signed) for signed in made):
            raise Unauthorized("this API key was not issued by this proxy", code="invalid_api_key")
        scope, tenant, episode, expires, issued, model, *consent = json.loads(
            base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        )
        lanes, always = consent or ((), False)
        claims = Claims(
            SCOPES[scope], tenant, episode, float("inf") if expires is None else expires, issued, model, tuple(lanes),
            always,
        )
        if now >= claims.expires:
            raise Unauthorized("this API key has expired", code="expired_api_key")
        if self.ring.revoked(key, claims):
            raise Unauthorized("this API key was revoked", code="revoked_api_key")
        return claims

    def authenticate(self, key: str | None, now: float) -> Claims:
        """The claims of a request that carries `key` (None: it carries none), or `Unauthorized`."""
        if self.is_open and (key is None or not key.startswith(KEY_PREFIX)):
            return self._without
        if key is None:
            raise Unauthorized(NO_KEY, code="missing_api_key")
        return self.verify(key, now)

def key_id(key: str) -> str:
    """The name of a key in logs and revocations: a hash, from which nobody can get the key."""
    return hashlib.sha256(_bytes(key)).hexdigest()[:16]


def masked(text: str) -> str:
    """`text` with our keys masked: callers put keys where none belongs, and errors quote callers."""
    return KEY.sub(f"{KEY_PREFIX}***", text)


def holds_key(text: str) -> bool:
    """Tell whether `text` contains a key that `Keys.issue` could have made; a name that only begins like one is none.
    """
    return KEY_PREFIX in text and any(found[1] for found in _SIGNED.finditer(text))


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key a request carries (`headers` are asked in lower case): ``Authorization: Bearer``, then ``x-api-key``.

    If there are two, one that we issued counts before somebody else's.
    """
    word, _, rest = headers.get("authorization", "").strip().partition(" ")
    bearer = rest.strip() if word.lower() == "bearer" else ""
    plain = headers.get("x-api-key", "").strip()
    if plain.startswith(KEY_PREFIX) and not bearer.startswith(KEY_PREFIX):
        return plain
    return bearer or plain or None


def proxy_key_in(header: str | None) -> str | None:
    """The key of ours in a ``Proxy-Authorization`` header: the user name of ``http://KEY@HOST:PORT``."""
    word, _, rest = (header or "").strip().partition(" ")
    if word.lower() != "basic":
        return None
    try:
        user, _, _ = base64.b64decode(rest.strip(), validate=True).decode().partition(":")
    except ValueError:
        return None
    return user if user.startswith(KEY_PREFIX) else None


def check_scope(claims: Claims, needed: str) -> None:
    """Raise `Forbidden` unless `claims` reach a route that needs scope `needed` (``any``: every key does but that of an
    operator, which reaches runs and nothing else)."""
    enough = claims.scope != "operator" if needed == "any" else claims.scope in (needed, "admin")
    if not enough:
        raise Forbidden(f"this needs a key of scope {needed!r}, not {claims.scope!r}", code="wrong_scope")


def _sign(secret: bytes, payload: str) -> str:
    return _encode(hmac.digest(secret, _bytes(payload), hashlib.sha256))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Header text as it came over the socket, whatever its bytes were."""
    return text.encode("utf-8", "surrogateescape")
