"""Prefix caches that know which weights filled them: a salt for each.

An engine that is paused for new weights keeps what it has computed for the calls in flight, so that they go on at once
(as in PipelineRL, Piché et al. 2025, arXiv:2509.19128); vLLM cannot empty its prefix cache while they hold a part of
it. A later call that found its prompt there would be answered half by weights of long ago. vLLM's ``cache_salt`` tells
callers apart that must not share the cache (https://docs.vllm.ai/en/latest/design/prefix_caching.html); here it tells
weights apart as well. A policy version does not name them alone: a trainer that goes on from an old checkpoint counts
from there once more. With the time at which the gate was last opened it does.
"""

from __future__ import annotations

import hashlib
from typing import Any

MAX_LENGTH = 128
"""vLLM's own limit, in characters."""
FORBIDDEN = "@/\\\0"
"""What vLLM refuses in a salt."""


def salted(own: Any, version: int, since: float) -> str | None:
    """The salt of a request with the ``cache_salt`` `own` under the policy `version` and the gate that was last moved
    at `since` (Unix seconds; 0: never). None where it must stay as it is: before the first update, and where the engine
    is to refuse it in its own words. What it refuses otherwise it refuses of the new salt as well.

    Equal arguments give equal salts and others others, so callers that share a salt share a cache as they did.
    """
    if not (version or since) or not (own is None or (isinstance(own, str) and 0 < len(own) <= MAX_LENGTH)):
        return None
    salt = f"{own or ''}#{version}.{round(since * 1000)}"
    if len(salt) <= MAX_LENGTH:
        return salt
    digest = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
    return digest + "#" + "".join(letter for letter in FORBIDDEN if letter in salt)
