"""Who read or rewarded what: one JSON line for each control action, reward on an LLM request, and read of an episode.

Pages and terminals list episodes every few seconds, and clients say as often that they are there. Such requests have
one line for a caller in `LISTED_S`, so that they do not push the other lines out of the file. A reader of events has a
line for each connection, when it begins.

A line says when, the key (as its `key_id`, never itself), its scope and tenant. It names the subject of the client's
certificate, if one was shown, the route, the episode or batch, and the status of the answer. It holds no body, header
or address as it was sent, so that the file can be shown around. Requests that were refused have a line too: their scope
is null where the key is not valid.

The file need not survive a crash, as the journal must: its lines are not synced to disk. Where it cannot be written,
the daemon says so once and serves on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from ajet_proxy.core.identity.headers import Headers
from ajet_proxy.core.identity.keys import Keys, key_id
from ajet_proxy.core.identity.ladder import key_of, split_path
from ajet_proxy.io.http import tls
from ajet_proxy.io.http.errors import Handler
from ajet_sdk.bodies import check_episode
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.headers import HEADER_EPISODE, HEADER_REWARD
from ajet_sdk.routes import PREFIX, ROUTES

logger = logging.getLogger(__name__)

NAME = "audit.jsonl"
MAX_BYTES = 256 << 20
FILES = 4
"""The file and its older ones, each of which holds its part of ``max_bytes``."""
SUBJECT = web.RequestKey("subject", str)
"""The episode or batch that a handler found or made, where the path does not name it."""
BEGUN: web.RequestKey[Callable[[int], None]] = web.RequestKey("begun")
"""The function that a handler calls, with its status, whose answer may go on for hours."""
LISTED_S = 300.0
MAX_READERS = 1000
LISTS = {"list_episodes", "overview"}
OFTEN = LISTS | {"beat", "supervise"}
"""Routes that a caller asks for again and again: one line in `LISTED_S` stands for all."""
READS = LISTS | {"get_episode", "events"}
_NAMES = {(route.method, PREFIX + route.path): route.name for route in ROUTES}


class AuditLog:
    """Appends lines to ``audit.jsonl`` in `data_dir`; it and its older files never exceed `max_bytes`."""

    def __init__(self, data_dir: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = data_dir / NAME
        self._each = max_bytes // FILES
        self._failing = False

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > self._each:
                self._shift()
            with open(self._path, "ab", buffering=0, opener=_private) as stream:
                end = stream.tell()
                if stream.write(data) != len(data):
                    stream.truncate(end)  # the next line would be unreadable too
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._failing:
                logger.error("the audit log cannot be written: %s", error.strerror)
            self._failing = True
        else:
            self._failing = False

    def _shift(self) -> None:
        """Make room for a fresh file; the oldest goes."""
        for number in range(FILES - 1, 0, -1):
            older = self._path.with_name(f"{NAME}.{number - 1}") if number > 1 else self._path
            if older.exists():
                os.replace(older, self._path.with_name(f"{NAME}.{number}"))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def audited(
    log: Callable[[Mapping[str, Any]], None], *, keys: Keys, now: Callable[[], float],
    headers: Callable[[web.Request], Headers],
) -> Any:
    """A middleware around all others that gives `log` a line, with the status the caller got."""

    listed: dict[tuple[Any, ...], float] = {}

    def repeats(line: Mapping[str, Any]) -> bool:
        """True if its caller has lately asked the same, which is asked often. All callers without a good key count as
        one."""
        if line["route"] not in OFTEN:
            return False
        reader = (line["key"] if line["scope"] else None, line["route"], line["status"])
        if 0 <= line["at"] - listed.get(reader, float("-inf")) < LISTED_S:
            return True
        if len(listed) >= MAX_READERS:
            listed.clear()
        listed[reader] = line["at"]
        return False

    @web.middleware
    async def audit(http: web.Request, handler: Handler) -> web.StreamResponse:
        name = _audited(http)
        if name is None:
            return await handler(http)
        caller, episode = _caller(http, headers(http), keys, now())
        shown = tls.subject(http)
        line: dict[str, Any] = {"at": round(now(), 3)} | caller | ({} if shown is None else {"certificate": shown})
        line["route"] = name
        status, said, begun = 499, None, False

        def write(status: int) -> None:
            nonlocal begun
            subject = _id(http.get(SUBJECT) or said or http.match_info.get("id", "") or episode or "")
            whole = line | {_kind(http): subject, "status": status}
            if not begun and not repeats(whole):
                log(whole)
            begun = True

        http[BEGUN] = write
        try:
            answer = await handler(http)
            status, said = answer.status, answer.headers.get(HEADER_EPISODE)
            return answer
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            write(status)

    return audit


def _audited(http: web.Request) -> str | None:
    """The name under which a request is audited; None if it is not."""
    resource = http.match_info.route.resource
    name = _NAMES.get((http.method, resource.canonical)) if resource is not None else None
    if name is None:
        return "reward_header" if HEADER_REWARD in http.headers else None
    return name if http.method != "GET" or name in READS else None


def _id(subject: str) -> str | None:
    """`subject` if it can be an id. Anything else may stand in a path, even a key."""
    try:
        return check_episode(subject)
    except BadRequest:
        return None


def _kind(http: web.Request) -> str:
    """The subject of a request."""
    kinds = {"batches": "batch", "clients": "client", "runs": "run"}
    return kinds.get(http.path.removeprefix(f"{PREFIX}/").partition("/")[0], "episode")


def _caller(http: web.Request, headers: Headers, keys: Keys, now: float) -> tuple[dict[str, Any], str | None]:
    """The caller, and the episode that the request names or that its key is for."""
    key = key_of(http.rel_url.raw_path, headers)
    named, _ = split_path(http.rel_url.raw_path)
    shown: dict[str, Any] = {"key": None if key is None else key_id(key), "scope": None, "tenant": None}
    try:
        claims = keys.authenticate(key, now)
    except AjetError:
        return shown, named
    if named is None or named == key:
        named = claims.episode or http.headers.get(HEADER_EPISODE)
    return shown | {"scope": claims.scope, "tenant": claims.tenant}, named
