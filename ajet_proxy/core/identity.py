"""Which episode a request belongs to, and what rides on it: contract section 3 as a function of path, headers and body.

Six ways are tried in one order: path, key, header, harness, body, lineage; the first that names an episode wins and
is recorded. A name says which episode, and the key says whether the caller may use it: a key issued for one episode
opens no other. Names that were made for us (path, header) must be valid; names borrowed from a harness or a body are
mapped to a valid id where they are not, always to the same one. Which episode it is that nothing names, `lineage`,
shows in what is asked: see `ajet_proxy.core.lineage`.

Next: ajet_proxy/core/dialects/chat.py
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ajet_proxy.core.keys import Claims, check_scope, key_in
from ajet_sdk.errors import BadRequest, Forbidden
from ajet_sdk.routes import (
    HEADER_AGENT,
    HEADER_CALL,
    HEADER_EPISODE,
    HEADER_EVAL,
    HEADER_FINAL,
    HEADER_PREFIX,
    HEADER_REWARD,
    HEADER_REWARD_CALL,
    HEADER_TASK,
    HEADER_WIRE,
    KEY_PREFIX,
    MAX_REWARD,
    check_id,
)

HARNESS_HEADERS = ("session-id", "thread-id", "x-claude-code-session-id", "x-session-id")
"""What Codex, Claude Code and opencode send by themselves, in the order in which they are looked at."""
_KNOWN = {name.lower(): name for name in (
    HEADER_EPISODE, HEADER_CALL, HEADER_TASK, HEADER_AGENT, HEADER_EVAL, HEADER_REWARD, HEADER_REWARD_CALL,
    HEADER_FINAL, HEADER_WIRE,
)}  # fmt: skip
MAX_LABEL = 1000
_WORDS = {"": False, "0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class RewardDirective:
    """A reward that rides on a request."""

    value: float
    call: str | None
    final: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """``path`` is the engine's (``/e/…`` taken off, as it was written). ``episode`` is None when nothing names one."""

    path: str
    claims: Claims
    scope: bytes
    """A digest of the key: the same for two requests only if one client sent both."""
    episode: str | None
    """Its id, or, in the ways of `core.borrowed`, the name that stands for one."""
    identified_by: str
    issued: bool
    """Whether the episode's own key named it, so that it must exist already."""
    task: str | None
    agent: str | None
    eval: bool
    reward: RewardDirective | None


def identify(
    *,
    path: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None,
    claims: Claims,
) -> Identity:
    """The identity of a request. `path` is as written in the request line, without its query; `headers` are asked by
    lower-case names; `claims` are those of the request's key (`key_of`).

    Raises `BadRequest` for an unusable name or label, `Forbidden` for a key that does not reach the named episode.
    """
    named, rest = split_path(path)
    key_in_path = named is not None and named.startswith(KEY_PREFIX)
    key = key_of(path, headers)
    check_scope(claims, "agent")
    episode, way, issued = None, "lineage", False
    if named is not None and not key_in_path:
        episode, way, issued = check_id(named), "path", named == claims.episode
    elif claims.episode is not None:
        episode, way, issued = claims.episode, "path" if key_in_path else "key", True
    elif header := headers.get(HEADER_EPISODE.lower()):
        episode, way = check_id(header, HEADER_EPISODE), "header"
    elif harness := _first(headers.get(name) for name in HARNESS_HEADERS):
        episode, way = harness, "harness"
    elif in_body := _named_in(body or {}):
        episode, way = in_body, "body"
    if claims.episode is not None and episode != claims.episode:
        raise Forbidden(f"this key is for another episode than {episode!r}", code="wrong_episode")
    return Identity(
        path=rest,
        claims=claims,
        scope=hashlib.sha256((key or "").encode("utf-8", "surrogatepass")).digest(),
        episode=episode,
        identified_by=way,
        issued=issued,
        task=_label(headers, HEADER_TASK),
        agent=_label(headers, HEADER_AGENT),
        eval=_flag(headers, HEADER_EVAL),
        reward=_reward(headers),
    )


def key_of(path: str, headers: Mapping[str, str]) -> str | None:
    """The key that counts: the one in the path, else that of the headers (see `key_in`)."""
    named, _ = split_path(path)
    return named if named is not None and named.startswith(KEY_PREFIX) else key_in(headers)


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Those header `names` (in lower case then) that look like ours and mean nothing, and which were probably meant."""
    ours = [name.lower() for name in names if name[: len(HEADER_PREFIX)].lower() == HEADER_PREFIX]
    return {name: _KNOWN[_nearest(name)] for name in ours if name not in _KNOWN}


def _nearest(name: str) -> str:
    return difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.0)[0]


def split_path(path: str) -> tuple[str | None, str]:
    """``/e/NAME/v1/…`` as NAME, with percent signs decoded, and ``/v1/…``; any other path has no name."""
    if not path.startswith("/e/"):
        return None, path
    name, slash, rest = path[3:].partition("/")
    return unquote(name), slash + rest


def _first(values: Any) -> str | None:
    return next((value for value in values if value), None)


def _named_in(body: Mapping[str, Any]) -> str | None:
    """``prompt_cache_key``, ``metadata.session_id``, ``metadata.user_id`` or ``user``."""
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    named = (
        body.get("prompt_cache_key"), metadata.get("session_id"), _session(metadata.get("user_id")), body.get("user"),
    )
    return _first(name for name in named if isinstance(name, str))


def _session(user_id: Any) -> Any:
    """Claude Code's ``user_id`` is JSON that holds a session id; every other one is a name as it stands."""
    if not isinstance(user_id, str) or not user_id.startswith("{"):
        return user_id
    try:
        parsed = json.loads(user_id)
    except (ValueError, RecursionError):
        return user_id
    session = parsed.get("session_id")
    return session if isinstance(session, str) and session else user_id


def _label(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name.lower())
    if value and (len(value) > MAX_LABEL or not is_text(value)):
        raise BadRequest(f"{name} must be UTF-8 text of at most {MAX_LABEL} characters", param=name)
    return value or None


def is_text(value: str) -> bool:
    """Whether `value` can be stored as UTF-8: headers and JSON can carry surrogates, which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(headers: Mapping[str, str], name: str) -> bool:
    value = headers.get(name.lower(), "").strip().lower()
    if value not in _WORDS:
        raise BadRequest(f"{name} must be 1 or 0, not {value[:80]!r}", param=name)
    return _WORDS[value]


def _reward(headers: Mapping[str, str]) -> RewardDirective | None:
    text = headers.get(HEADER_REWARD.lower())
    call = _label(headers, HEADER_REWARD_CALL)
    final = _flag(headers, HEADER_FINAL)
    if text is None:
        if final or call is not None:
            raise BadRequest(f"{HEADER_FINAL} and {HEADER_REWARD_CALL} need {HEADER_REWARD}", param=HEADER_REWARD)
        return None
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_REWARD:
        raise BadRequest(
            f"{HEADER_REWARD} must be a finite number of at most {MAX_REWARD:g}, not {text[:80]!r}", param=HEADER_REWARD
        )
    return RewardDirective(value=value, call=call, final=final)
