"""The words of a request, compared with those of its episode that went unanswered, and with the first.

Two requests are compared by a key: the kind of a history, its length and its digest at the level of words. So a retry
is known whatever its sampling, and mostly in another dialect too. No words are kept.

The task of an episode that was given none is a digest of what its first request says, in the same words for everybody.
But a program may ask for something else before its task begins: whether the model is there, or what its quota is. Such
a probe is the same whatever the task, so no task is named by it (`core.protocol.dialect`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

from ajet_proxy.core.conversation.history import MALFORMED, SIZE, History, packed


class Said:
    """The words of a request, by its `history`, or by those of its `fields` that hold them."""

    def __init__(self, history: History | None, fields: Mapping[str, Any], scope: bytes) -> None:
        self._history, self._fields, self._scope = history, fields, scope

    @cached_property
    def key(self) -> str:
        """The key of all that it says. What has no history that can be told is known only if it comes again as it
        was."""
        history = self._history
        if history is not None and (whole := history.until([history.length])):
            return f"{history.kind}:{history.length}:{whole[history.length]}"
        try:
            said = packed(list(self._fields.items()))
        except MALFORMED:
            said = b""
        return f"other:0:{blake2b(said, key=self._scope, digest_size=SIZE).hexdigest()}"

    def begins_with(self, keys: Collection[str]) -> tuple[str, ...]:
        """The ones of `keys` with which it begins."""
        history, parts = self._history, {key: key.rsplit(":", 2) for key in keys}
        alike = {key for key, (kind, _, _) in parts.items() if history is not None and kind == history.kind}
        begun = {} if history is None else history.until({int(parts[key][1]) for key in alike})
        return tuple(
            key for key, (_, length, digest) in parts.items()
            if (begun.get(int(length)) == digest if key in alike else key == self.key)
        )

    @property
    def prompt(self) -> str:
        """24 hexadecimal digits that stand for its words; empty if they cannot be told."""
        return "" if self._history is None else self._history.prompt
