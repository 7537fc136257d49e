"""The words of a request, compared with those of its episode that went unanswered, and with the first.

Two requests are compared by a key: the kind of a history, its length and its digest at the level of words. So a retry
is known whatever its sampling, and mostly in another dialect too. No words are kept.

The task of an episode that was given none is a digest of what its first request says, in the same words for everybody.
But a program may ask for something else before its task begins: whether the model is there, or what its quota is. Such
a probe is the same whatever the task, so no task is named by it. A request is a probe if it offers no tools and allows
at most `PROBE` tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any, Final

from ajet_proxy.core.conversation.history import MALFORMED, SIZE, History, packed

PROBE: Final = 4
"""Tokens."""
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SAID: Final = ("system", "instructions", "messages", "input", "prompt", "previous_response_id")


class Said:
    """The words of a request with `fields`, by its `history`."""

    def __init__(self, history: History | None, fields: Mapping[str, Any], scope: bytes) -> None:
        self._history, self._fields, self._scope = history, fields, scope

    @property
    def key(self) -> str:
        """The key of all that it says. What has no history that can be told is known only if it comes again as it
        was."""
        history = self._history
        if history is not None and (whole := history.until(None)) is not None:
            return f"{history.kind}:{whole[0]}:{whole[1]}"
        try:
            said = packed([self._fields.get(name) for name in _SAID])
        except MALFORMED:
            said = b""
        return f"other:0:{blake2b(said, key=self._scope, digest_size=SIZE).hexdigest()}"

    def begins_with(self, keys: Collection[str]) -> tuple[str, ...]:
        """Those of `keys` with which it begins."""
        return tuple(key for key in keys if self._begins_with(key))

    @property
    def prompt(self) -> str:
        """24 hexadecimal digits that stand for its words; empty if they cannot be told."""
        return "" if self._history is None else self._history.prompt

    @property
    def is_first(self) -> bool:
        """Tell whether there is no answer in it, so that a conversation begins with it."""
        fields = self._fields
        said = fields.get("messages", fields.get("input"))
        if fields.get("previous_response_id") is not None:
            return False
        return not (isinstance(said, list) and any(isinstance(one, Mapping) and _is_answer(one) for one in said))

    @property
    def is_probe(self) -> bool:
        """Tell whether it asks before the task begins."""
        for name in _LIMITS:
            if isinstance(limit := self._fields.get(name), int):
                return limit <= PROBE and not self._fields.get("tools")
        return False

    def _begins_with(self, key: str) -> bool:
        history, (kind, length, digest) = self._history, key.rsplit(":", 2)
        if history is None or kind != history.kind:
            return key == self.key
        return history.until(int(length)) == (int(length), digest)


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")
