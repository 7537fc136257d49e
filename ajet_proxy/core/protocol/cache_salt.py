"""Prefix caches that know which weights filled them: a salt for each.

An engine that is paused for new weights keeps what it has computed for the calls in flight (as in PipelineRL, Piché et
al. 2025, arXiv:2509.19128), so that they go on at once. vLLM cannot empty its prefix cache while they hold a part of
it. If a later call found its prompt there, it would be answered half by old weights. vLLM's ``cache_salt`` separates
callers that must not share the cache (https://docs.vllm.ai/en/latest/design/prefix_caching.html). Here it separates
weights as well. A policy version alone does not name them: a trainer that goes on from an old checkpoint counts from
there once more. With the time at which the gate was last opened it does.
"""

from __future__ import annotations

import hashlib
from typing import Any

MAX_LENGTH = 128
"""vLLM's own limit, in characters."""
FORBIDDEN = "@/\\\0"
"""Characters that vLLM refuses in a salt."""


def salted(own: Any, version: int, since: float) -> str | None:
    """The salt of a request whose own ``cache_salt`` is `own`, under the policy `version` and the gate that was last
    moved at `since` (Unix seconds; 0: never). None if the salt must stay as it is: before the first update, and where
    the engine should refuse it in its own words. Anything else that the engine refuses, it refuses in the new salt too.

    Equal arguments give equal salts, and others give others. So callers that share a salt share a cache as before.
    """
    if not (version or since) or not (own is None or (isinstance(own, str) and 0 < len(own) <= MAX_LENGTH)):
        return None
    salt = f"{own or ''}#{version}.{round(since * 1000)}"
    if len(salt) <= MAX_LENGTH:
        return salt
    digest = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
    return digest + "#" + "".join(letter for letter in FORBIDDEN if letter in salt)
