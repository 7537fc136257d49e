"""What may be an id and what a logprob: two rules that SDK, proxy and trainer share."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence

from ajet_sdk.errors import BadRequest

KEY_PREFIX = "ajet-"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}\Z")
LOGPROB_SLACK = 1e-3
"""A log probability is at most 0; engines that compute in half precision overshoot by less than this."""


def check_id(value: str, name: str = "episode") -> str:
    """`value` if it can name an episode (1 to 200 of ``A-Z a-z 0-9 . _ : @ -``, not starting like a key)."""
    if not _ID.match(value) or value.startswith(KEY_PREFIX):
        raise BadRequest(
            f"{name} must be 1 to 200 letters, digits or . _ : @ - and may not begin with {KEY_PREFIX!r}", param=name
        )
    return value


def are_logprobs(values: Sequence[float]) -> bool:
    """Whether `values` can be logprobs, as the 32-bit floats that a trainer gets: finite, and above 0 by no more than
    rounding makes. (vLLM tells -inf as -9999.)"""
    narrow = array("f", values)
    return math.isfinite(sum(narrow)) and max(narrow, default=0.0) <= LOGPROB_SLACK
