"""Prefix caches that know policy versions: a salt for each of them.

An engine that is paused for new weights keeps what it has computed for the calls in flight, so that they go on at once
(as in PipelineRL, Piché et al. 2025, arXiv:2509.19128); vLLM cannot empty its prefix cache while they hold a part of
it. A later call that found its prompt there would be answered half by weights of long ago. vLLM's ``cache_salt`` tells
callers apart that must not share the cache (https://docs.vllm.ai/en/latest/design/prefix_caching.html); here it tells
policy versions apart as well.
"""

from __future__ import annotations

import hashlib
from typing import Any

MAX_LENGTH = 128
"""vLLM's own limit, in characters."""


def salted(own: Any, version: int) -> str | None:
    """The salt of a request with the ``cache_salt`` `own` under `version`; None where it must stay as it is: under the
    first version, before which nothing was computed, and where the engine is to refuse it in its own words.

    Equal arguments give equal salts and others others, so callers that share a salt share a cache as they did.
    """
    if version <= 0 or not (own is None or (isinstance(own, str) and 0 < len(own) <= MAX_LENGTH)):
        return None
    salt = f"{own or ''}#{version}"
    return salt if len(salt) <= MAX_LENGTH else f"{hashlib.sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()}#"
