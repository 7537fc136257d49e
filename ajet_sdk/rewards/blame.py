"""Tells whose failure an exception is. It is the world's if somebody could not be reached, or failed to answer.

Idea: the agent's client is anybody's. So its exceptions are known by the status that they keep and by the names of
their classes, and no client is imported. One that says nothing is known by its cause, and a group by what is in it. An
exception before it is no cause: the agent may have mended that (``unanswered`` in the episode's record knows it).

A client that gave up waiting for an answer does not say who failed: a policy that rambles looks the same. The proxy
knows it (``unanswered`` in the episode's record).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection
from itertools import chain
from typing import Any

from ajet_sdk.errors import SENT_BADLY

CONNECTING = {"ConnectTimeout", "ConnectTimeoutError", "ConnectionTimeoutError", "URLError"}
"""Had no connection yet, so that nobody was waited for who answers."""
WAITING = {"TimeoutError", "TimeoutException", "Timeout", "APITimeoutError", "ReadTimeoutError"}
OWN = {"LocalProtocolError", "UnsupportedProtocol", "InvalidURL", "BrokenPipeError"}
"""Would have failed in any world, or is rather of a program that the agent started."""
NO_SERVER = (str, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Reasons of urllib's `URLError` by which no server was asked: the address is none, or is a file's."""
CUT = {"PayloadEncodingError"}
"""An answer that ends too early, which aiohttp gives a status of its own."""
UNREACHED = {
    "APIConnectionError", "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "ConnectionError",
    "IncompleteRead", "IncompleteReadError", "NetworkError", "NewConnectionError", "ProtocolError", "ProxyError",
    "gaierror",
}  # fmt: skip
"""Reached nobody, or were cut off: in the standard library, httpx, aiohttp, requests, urllib3, openai and anthropic."""
NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
MODEL_CLIENT = "APIError"
"""The base of the errors that clients of models raise, as openai and anthropic do. These keep the ``body`` of the
answer; the errors of docker, say, have that name as well, and keep none."""
TOO_MANY = re.compile(r"too many ([0-9]{3}) error responses")
"""The words of urllib3 if each try of a request was answered with one status."""


_NONE = object()


class WorldFailed(Exception):
    """The world failed, and not the agent: the episode is given up, and never trained."""


class Busy(WorldFailed):
    """The world is full: the episode found no place in it. That is no attempt."""


class Interrupted(BaseException):
    """The run was interrupted, and its episode is given up."""


def reason_of(error: BaseException) -> str:
    """An exception as an abort's reason: its type and the first 500 characters of its text."""
    text = text_of(error).strip().encode("utf-8", "replace").decode()
    if text and isinstance(error, (WorldFailed, Interrupted)):
        return text[:500]
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """The text of an exception; empty if even that fails."""
    try:
        return str(error)
    except Exception:
        return ""


def _read(thing: Any, name: str, missing: Any = None) -> Any:
    """An attribute of anybody's object; `missing` if it has none, or fails to give it."""
    try:
        return getattr(thing, name, missing)
    except Exception:
        return missing


def of_the_world(error: BaseException, infra: tuple[type[BaseException], ...] = ()) -> bool:
    """True if the world failed, and not the agent. Exceptions of the classes `infra` say so too."""
    return _says(error, (WorldFailed, *infra), []) is True


def world_is_full(error: BaseException | None) -> bool:
    """True if `error` is a `Busy`, or was caused by one."""
    found = [] if error is None else [error]
    for one in found:
        found += [cause for cause in _causes(one) if not any(cause is known for known in found)]
    return any(isinstance(one, Busy) for one in found)


def _causes(error: BaseException) -> list[BaseException]:
    """The exceptions that caused `error`, or are in it."""
    inside = [found for name in ("args", "exceptions") if isinstance(found := _read(error, name), (list, tuple))]
    causes = (_read(error, "__cause__"), _read(error, "reason"), *chain(*inside))
    return [one for one in causes if isinstance(one, BaseException)]


def _says(error: BaseException, infra: tuple[type[BaseException], ...], seen: list[BaseException]) -> bool | None:
    """True if it was the world, False if it was not, None if `error` does not tell."""
    if any(error is one for one in seen):
        return None
    seen.append(error)
    if isinstance(error, infra):
        return True
    inside = {_says(one, infra, seen) for one in _causes(error)}
    own = _by_itself(error, inside)
    if own is None and inside - {None}:
        return True in inside
    return own


def _by_itself(error: BaseException, inside: Collection[bool | None]) -> bool | None:
    """The word of `error` alone, where those `inside` it say so much."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if _read(error, "errno") in NO_WAY or names & CUT:
        return True
    if names & WAITING and not names & CONNECTING:
        return True in inside
    status = _status(error)
    if status is not None and status >= 400:
        if status in SENT_BADLY:
            return False
        # a 404, say, refuses whatever a model is asked; of another server it may answer what the policy asked for
        return True if status >= 500 or status == 429 or _asks_models(error, names) else None
    if names & OWN or (names & UNREACHED and False in inside):
        return False
    if "URLError" in names and isinstance(_read(error, "reason"), NO_SERVER):
        return False
    return True if names & (CONNECTING | UNREACHED) or _asks_models(error, names) else None


def _asks_models(error: BaseException, names: Collection[str]) -> bool:
    """Tell whether a client of models raised `error`."""
    return MODEL_CLIENT in names and _read(error, "body", _NONE) is not _NONE


def _status(error: BaseException) -> int | None:
    """The HTTP status that a client keeps with its error."""
    if not isinstance(error, Exception):
        return None  # the code of SystemExit is none
    if type(error).__name__ == "ResponseError" and (found := TOO_MANY.fullmatch(text_of(error))):
        return int(found[1])
    for place in (error, _read(error, "response")):
        for name in ("status_code", "status", "code"):
            code = _read(place, name)
            if isinstance(code, int) and 100 <= code < 600:
                return code
    return None
