"""The tokens that an answer that passes through says it took, for the quota of its tenant.

What is not captured passes as it comes, whatever its size. What it took stands at its end, in the ``usage`` of a
document or of a stream's last event. So the last bytes are kept, and looked at when it is over.

Invariant: `tokens` is a count, 0 if none is told; nothing in an answer makes it fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

LAST = 4096
"""So many bytes hold the ``usage`` and what engines write behind it."""
MOST = 1 << 53
"""So many tokens nobody has used."""
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_PARTS = (("total_tokens",), ("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))


class Tail:
    """The end of an answer that is fed piece by piece."""

    _last = b""

    def feed(self, data: bytes) -> None:
        self._last = (self._last + data[-LAST:])[-LAST:]

    def tokens(self) -> int:
        """The sum of the last ``usage``: its total, or else the tokens that were read and written."""
        for text in reversed(_USAGE.findall(self._last)):
            try:
                usage = json.loads(text)
            except (ValueError, RecursionError):
                continue
            return next((total for total in (_sum(usage, names) for names in _PARTS) if total), 0)
        return 0


def _sum(usage: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return sum(value for name in names if type(value := usage.get(name)) is int and 0 < value < MOST)
