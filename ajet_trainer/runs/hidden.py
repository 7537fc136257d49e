"""Hides from those who look from afar a host's folders, keys, and passwords in addresses.

Invariant: what is hidden is hidden in every text that leaves the host, whichever file it stood in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ajet_sdk.bodies import KEY

_MARK = "***"
_PASSWORD = re.compile(r"(?<=://)[^\s'\"<>]+@")
"""Up to the last ``@``: a password that nobody has escaped may hold any sign of an address."""
_NAMED = re.compile(
    r"(?i)\b([a-z-]*(?:api[-_]?key|token|password|secret)[\"']?\s*[=:]\s*[\"']?)(?!\*\*\*)[^\s'\",&]{4,}"
)
"""A value behind the name of a key, in a query, a header or a document."""
_KEYS = re.compile(rf"(?<![A-Za-z0-9])(?:{KEY.pattern}|sk-[A-Za-z0-9_-]{{16,}}|hf_[A-Za-z0-9]{{16,}})")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",]+")


class Hidden:
    """`words` maps what is hidden to what is shown instead. Of two, the longer one is looked for first."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self._words = sorted(words.items(), key=lambda item: -len(item[0]))

    def text(self, text: str) -> str:
        """`text` as it may be shown. Keys of ajet and of known providers are hidden by their form."""
        for word, shown in self._words:
            text = text.replace(word, shown)
        text = _KEYS.sub(_MARK, _PASSWORD.sub(f"{_MARK}@", text))
        return _NAMED.sub(rf"\1{_MARK}", _BEARER.sub(rf"\1{_MARK}", text))

    def value(self, value: Any) -> Any:
        """A value of JSON with every text in it as it may be shown."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self.value(item) for name, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value
