"""The headers of a request as the proxy reads them: a key, a session, labels, a reward, and whether it is a retry.

What is asked for more than once a request is read once.

A client that sends a request again may say so. Some SDKs count their retries; others give both requests one key. A
request with another body is another request, whatever its key says. Only digests are kept of either. A count says less
than a key. Of several requests with equal bodies (a best of n), any may be the one that is sent again. So may one that
never became a call (`ajet_proxy.core.ledger.retries`).
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct

from ajet_proxy.core.identity.keys import key_in
from ajet_sdk import headers as ours
from ajet_sdk.bodies import check_id
from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import MAX_LABEL, MAX_REWARD
from ajet_sdk.routes import Reward

SHARED_HEADERS = ("x-session-id", "x-opencode-session", "x-session-affinity")
"""Headers that opencode sends. Other programs send the same names, with values that may name no run."""
HARNESS_HEADERS = ("session-id", "thread-id", "x-claude-code-session-id", *SHARED_HEADERS)
"""Headers that Codex, Claude Code and opencode send by themselves, in the order in which they are looked at."""
PARENT_HEADER = "x-parent-session-id"
"""With which opencode names the session that began this one."""
SUBAGENT_HEADER = "x-claude-code-agent-id"
"""With which Claude Code names a sub-agent; its main agent sends none."""
_KNOWN: dict[str, str] = {
    value.lower(): value for name, value in vars(ours).items() if name.startswith("HEADER_") and name != "HEADER_PREFIX"
}
LIKELY = 80
"""A name of more characters is like none of ours."""
_WORDS = {"": False, "0": False, "false": False, "1": True, "true": True}


class Labels(Struct, frozen=True):
    """The word of a request's headers on its episode, the reward that they give it, and who plays it. ``traffic`` says
    whether something may be learned from it; None if they do not say."""

    task: str | None
    agent: str | None
    eval: bool
    reward: Reward | None
    client: str | None = None
    traffic: bool | None = None


_NO_LABELS = Labels(None, None, False, None)


class Headers:
    """The headers of a request as they were `sent`. Of several with one name the first counts."""

    def __init__(self, sent: Mapping[str, str]) -> None:
        self.sent = sent
        self._by_name: dict[str, str] = {}
        for name, value in sent.items():
            self._by_name.setdefault(name.lower(), value)
        self._has_ours = any(name.startswith(ours.HEADER_PREFIX) for name in self._by_name)

    @cached_property
    def key(self) -> str | None:
        """The key that they carry; see `keys.key_in`."""
        return key_in(self._by_name)

    @cached_property
    def episode(self) -> str | None:
        """The episode that a header of ours names; `BadRequest` for an unusable name."""
        header = self._by_name.get(ours.HEADER_EPISODE.lower()) if self._has_ours else None
        return check_id(header, ours.HEADER_EPISODE) if header else None

    @cached_property
    def session(self) -> tuple[str, str] | None:
        """The header by which a harness names a session without being asked to, and the session."""
        return next(((name, value) for name in HARNESS_HEADERS if (value := self._by_name.get(name))), None)

    @property
    def parent_session(self) -> str | None:
        """The session that began the one in one of `SHARED_HEADERS`."""
        return self._by_name.get(PARENT_HEADER) or None

    @property
    def labels(self) -> Labels:
        """The labels and the reward of this request; `BadRequest` for what cannot be used."""
        if not self._has_ours and SUBAGENT_HEADER not in self._by_name:
            return _NO_LABELS
        return Labels(
            task=self._text(ours.HEADER_TASK), agent=self._text(ours.HEADER_AGENT) or self._text(SUBAGENT_HEADER),
            eval=self._flag(ours.HEADER_EVAL),
            reward=self._reward(), client=self._text(ours.HEADER_CLIENT),
            traffic=self._flag(ours.HEADER_TRAFFIC) if self._by_name.get(ours.HEADER_TRAFFIC.lower()) else None,
        )

    def came_through(self, daemon: str) -> bool:
        """Tell whether `daemon` has sent this request on before, as ``Via`` says (RFC 9110, section 7.6.3)."""
        if "via" not in self._by_name:
            return False
        via = (value for name, value in self.sent.items() if name.lower() == "via")
        return any(daemon in value.replace(",", " ").split() for value in via)

    @property
    def misspelt(self) -> list[str]:
        """Names (in lower case, of `LIKELY` characters at most) that look like ours and mean nothing."""
        if not self._has_ours:
            return []
        unknown = (name for name in self._by_name if name.startswith(ours.HEADER_PREFIX) and name not in _KNOWN)
        return [name[:LIKELY] for name in unknown]

    def _text(self, name: str) -> str | None:
        value = self._by_name.get(name.lower())
        if value and (len(value) > MAX_LABEL or not is_text(value)):
            raise BadRequest(f"{name} must be UTF-8 text of at most {MAX_LABEL} characters", param=name)
        return value or None

    def _flag(self, name: str) -> bool:
        value = self._by_name.get(name.lower(), "").strip().lower()
        if value not in _WORDS:
            raise BadRequest(f"{name} must be 1 or 0, not {value[:80]!r}", param=name)
        return _WORDS[value]

    def _reward(self) -> Reward | None:
        text = self._by_name.get(ours.HEADER_REWARD.lower())
        call, state = self._text(ours.HEADER_REWARD_CALL), self._text(ours.HEADER_REWARD_STATE)
        final, model = self._flag(ours.HEADER_FINAL), self._text(ours.HEADER_REWARD_MODEL)
        agent, note = self._text(ours.HEADER_REWARD_AGENT), self._by_name.get(ours.HEADER_REWARD_NOTE.lower()) or None
        if state is not None and call is None:
            said = f"{ours.HEADER_REWARD_STATE} needs {ours.HEADER_REWARD_CALL}"
            raise BadRequest(said, param=ours.HEADER_REWARD_STATE)
        if text is None:
            if final or {call, model, agent, note} != {None}:
                needy = f"{ours.HEADER_FINAL} and the headers {ours.HEADER_REWARD}-…"
                raise BadRequest(f"{needy} need {ours.HEADER_REWARD}", param=ours.HEADER_REWARD)
            return None
        if any(name.lower() == ours.HEADER_REWARD.lower() and value != text for name, value in self.sent.items()):
            raise BadRequest(f"{ours.HEADER_REWARD} is there twice, with two values", param=ours.HEADER_REWARD)
        try:
            value = math.nan if "_" in text else float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= MAX_REWARD:
            raise BadRequest(
                f"{ours.HEADER_REWARD} must be a finite number of at most {MAX_REWARD:g}, not {text[:80]!r}",
                param=ours.HEADER_REWARD,
            )
        return Reward(value=value, call=call, agent=agent, final=final, note=note, state=state, model=model)


def meant(name: str) -> str:
    """The header that was probably meant by one of the `misspelt` names. It takes a millisecond to tell."""
    return _KNOWN[difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.0)[0]]


def is_text(value: str) -> bool:
    """Tell whether `value` can be stored as UTF-8: headers and JSON can carry surrogates, which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- retries

MOST_DIGITS = 9
"""No more of a count of retries are read."""


def retry_keys(headers: Mapping[str, str], path: str, body: bytes, *, scope: bytes) -> dict[str, Any]:
    """By what a request is recognized when it is sent again, and how often the client says it was. `scope` keeps apart
    clients that do not name their episodes. Names in `headers` are found in any case."""
    key = retry_key(headers)
    return {
        "body_hash": hashlib.sha256(scope + path.encode() + b"\n" + body).hexdigest(),
        "idempotency_key": key and hashlib.sha256(scope + key.encode() + body).hexdigest(),
        "retries": retries(headers),
    }


def retries(headers: Mapping[str, str]) -> int:
    """The count of times that the client says it has sent this before; 0 if it does not say."""
    count = headers.get("X-Stainless-Retry-Count", "")
    if not (count.isascii() and count.isdigit()):
        return 0
    return int(count.lstrip("0")[:MOST_DIGITS] or "0")


def retry_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request shares with its retries, as 64 hexadecimal digits of a digest; None if it has none."""
    key = headers.get("Idempotency-Key")
    return None if not key else hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
