"""Logprobs as an engine tells them: one number for each sampled token, which can be the logarithm of a probability.

Invariant: what comes out can be trained as it is; `ajet_sdk.limits.are_logprobs` says what that means.
"""

from __future__ import annotations

from typing import Any

from msgspec import convert

from ajet_proxy.core.tokens import NOT_SO
from ajet_sdk.limits import are_logprobs


def logprobs_of(values: Any) -> tuple[float, ...] | None:
    """The list `values` as floats; None if it is none, or holds anything that is no logprob."""
    try:
        numbers = convert(values, list[float])
    except NOT_SO:
        return None
    return tuple(numbers) if are_logprobs(numbers) else None
