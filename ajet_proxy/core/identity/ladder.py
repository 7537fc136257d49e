"""The episode of a request, and the word of its headers: contract §3 as a function of path, headers and body.

Six ways are tried in one order: path, key, header, harness, body, lineage; the first that names an episode wins and is
recorded. A name says which episode, and the key says whether the caller may use it: a key issued for one episode opens
no other. Names that were made for us (path, header) must be valid. Names borrowed from a harness or a body are mapped
to a valid id if they are not one, always to the same. If nothing names an episode, the way is `lineage`: the history in
the request shows the episode (see `ajet_proxy.core.conversation.history`).

Next: ajet_proxy/io/capture/pipeline.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import unquote

from msgspec import Struct

from ajet_proxy.core.identity.headers import SHARED_HEADERS, Headers, Labels
from ajet_proxy.core.identity.keys import Claims, check_scope
from ajet_sdk.bodies import KEY_PREFIX, check_id
from ajet_sdk.errors import Forbidden

Way = Literal["path", "key", "header", "harness", "body", "lineage"]
"""The ways to name an episode, in the order in which they are tried."""
MAX_SESSION = 10_000
"""A ``user_id`` of more characters is not looked into."""


_NOBODY = hashlib.sha256(b"").digest()
"""The scope of all who have no key."""


class Identity(Struct, frozen=True):
    """``path`` is the engine's, as it was written but without ``/e/…``. ``episode`` is None if nothing names one."""

    path: str
    claims: Claims
    scope: bytes
    """A digest of the key: the same for two requests only if one client sent both."""
    episode: str | None
    """Its id, or, in the ways of `core.ledger.session_names`, the name that stands for one."""
    identified_by: Way
    issued: bool
    """True if the episode's own key named it, so that it must exist already."""
    labels: Labels
    parent: str | None = None
    """The session that began the one which ``episode`` names: both are of one episode."""
    may_be_shared: bool = False
    """True if the name may be that of several runs."""
    first: str = ""
    """The episode of which a later part is meant, or would open."""
    lane: str = ""
    """The lane of ``first``, if it is users' traffic."""

    @property
    def consents(self) -> bool:
        """True if what opens may be learned from. A later part's consent is that of the parts before it."""
        said = self.labels.traffic
        return bool(self.lane) or (self.claims.always if said is None else said)

    @property
    def traffic(self) -> str:
        """The lane of what opens, if that is users' traffic: with a key for that, all but an evaluation of which no
        consent is said. Its users see no error either, so what has no consent is traffic too."""
        told = self.consents or self.labels.traffic is not None or not self.labels.eval
        return self.lane or (self.claims.lanes[0] if self.claims.lanes and told else "")


def identify(*, path: str, headers: Headers, body: Mapping[str, Any] | None, claims: Claims) -> Identity:
    """The identity of a request. `path` is as written in the request line, without its query; `claims` are those of the
    request's key (`key_of`).

    Raises `BadRequest` for an unusable name or label, `Forbidden` for a key that does not reach the named episode.
    """
    named, rest = split_path(path)
    key_in_path = _is_key(named)
    key = named if key_in_path else headers.key
    check_scope(claims, "agent")
    episode: str | None = None
    way: Way = "lineage"
    issued = False
    parent, may_be_shared = None, False
    if named is not None and not key_in_path:
        episode, way, issued = check_id(named), "path", named == claims.episode
    elif claims.episode is not None:
        episode, way, issued = claims.episode, "path" if key_in_path else "key", True
    elif headers.episode is not None:
        episode, way = headers.episode, "header"
    elif headers.session is not None:
        (header, episode), way = headers.session, "harness"
        if may_be_shared := header in SHARED_HEADERS:
            parent = headers.parent_session
    elif in_body := _named_in(body or {}):
        episode, way, may_be_shared = in_body, "body", True
    if claims.episode is not None and episode != claims.episode:
        raise Forbidden(f"this key is for another episode than {episode!r}", code="wrong_episode")
    return Identity(
        path=rest,
        claims=claims,
        scope=hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest() if key else _NOBODY,
        episode=episode,
        identified_by=way,
        issued=issued,
        labels=headers.labels,
        parent=parent,
        may_be_shared=may_be_shared,
    )


def key_of(path: str, headers: Headers) -> str | None:
    """The key that counts: the one in the path, else the one in the headers."""
    named, _ = split_path(path)
    return named if _is_key(named) else headers.key


def _is_key(named: str | None) -> bool:
    """Tell whether the path has a key in the place of an episode's name."""
    return named is not None and named.startswith(KEY_PREFIX)


def split_path(path: str) -> tuple[str | None, str]:
    """``/e/NAME/v1/…`` as NAME, with percent signs decoded, and ``/v1/…``; any other path has no name."""
    if not path.startswith("/e/"):
        return None, path
    name, slash, rest = path[3:].partition("/")
    return unquote(name) if "%" in name else name, slash + rest


def _named_in(body: Mapping[str, Any]) -> str | None:
    """The first name in ``prompt_cache_key``, ``metadata.session_id``, ``metadata.user_id`` and ``user``."""
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    named = (
        body.get("prompt_cache_key"), metadata.get("session_id"), _session(metadata.get("user_id")), body.get("user"),
    )
    return next((name for name in named if name and isinstance(name, str)), None)


def _session(user_id: Any) -> Any:
    """Claude Code's ``user_id`` is JSON that holds a session id; any other ``user_id`` is itself the name."""
    if not isinstance(user_id, str) or not user_id.startswith("{") or len(user_id) > MAX_SESSION:
        return user_id
    try:
        parsed = json.loads(user_id)
    except (ValueError, RecursionError):
        return user_id
    session = parsed.get("session_id")
    return session if isinstance(session, str) and session else user_id
