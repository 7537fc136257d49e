"""The bounds of what bodies may hold, and the forms of names, addresses, shares and agents in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ajet_sdk.address import server
from ajet_sdk.bodies import check_length
from ajet_sdk.errors import BadRequest

MAX_LANES = 100
"""Lanes of a mix."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NEARLY = 1e-4
"""So far from 1 may shares add up: they are decimal numbers that somebody has rounded."""
MAX_LABEL = 1000
"""Characters of the name of a task, a model, an agent or a state."""
MAX_CLIENT_TEXT = 200
"""Characters of a client's name or lane, of a revision, and of a run."""
MAX_ID = 200
"""Characters of a reward's id, and of an answer's."""
MAX_SPENT = 10**12
"""Tokens that a judge says at once to have used."""
MAX_WORDS = 10_000
"""Characters of a note or a reason."""
MAX_VERSION = 2**31 - 1
"""No policy version is larger: batches say them in 32 bits."""
MAX_REWARD = 1e12
"""No reward is larger, on either side of 0: sums of as many as there are, and their squares, stay finite numbers."""
MAX_EVALUATION = 10_000
"""Episodes of one evaluation: each is kept in memory while it is the latest."""
MAX_PLAY = 1_000_000
"""Episodes of one play: each that was given back is kept in memory."""
MAX_TTL_S = 3600.0
MAX_AHEAD = 1_000_000
MAX_LANE_WAIT_S = 3600.0
MAX_GROUPS = 100_000
"""Of a lease; and episodes of a group."""
MAX_CONTROL = 1 << 20
"""Bytes of the body of a control request."""
MAX_OPENING = 64 << 10
"""The body that opens an episode is kept as long as the episode."""
MAX_WAIT_S = 3600.0
"""The longest that one request waits."""
MAX_AGE_S = 1e9
"""Seconds that anything is open or waited for; some thirty years, so that times add up exactly."""
MAX_LEASE_S = 7 * 86400.0
MAX_JUDGEMENTS = 1000
"""Of a lease; and rewards of a judgement."""


def check_shares(shares: Mapping[str, float], name: str = "shares") -> None:
    """`BadRequest` for what cannot be the shares of lanes."""
    if not 1 <= len(shares) <= MAX_LANES:
        raise BadRequest(f"shares must name 1 to {MAX_LANES} lanes", param="shares")
    for lane, share in shares.items():
        if not lane or len(lane) > MAX_LABEL or "/" in lane:
            message = f"shares: {lane[:80]!r} is no lane: one has 1 to {MAX_LABEL} characters, without a '/'"
            raise BadRequest(message, param="shares")
        if not 0 <= share <= 1:
            message = f"shares: that of {lane[:80]!r} must be a number from 0 to 1, not {share:g}"
            raise BadRequest(message, param="shares")
    if not abs(math.fsum(shares.values()) - 1) <= _NEARLY:
        raise BadRequest(f"shares must add up to 1, not {math.fsum(shares.values()):g}", param="shares")


def check_upstreams(urls: Sequence[str], name: str = "upstreams") -> None:
    """Raises `BadRequest` for what is no engine's base URL."""
    for url in urls:
        if server(url) is None or "@" in url:
            raise BadRequest(f"upstream {url.rpartition('@')[2][:200]!r} is no http://HOST:PORT", param=name)


def check_name(value: str, name: str = "run") -> str:
    """`value` if it can name a run or a supervisor, and a folder, or `BadRequest`."""
    if not _NAME.fullmatch(value):
        said = "1 to 64 letters, digits or . _ - and begin with a letter or digit"
        raise BadRequest(f"{name} must have {said}, not {value[:80]!r}", param=name)
    return value


def check_agents(models: Mapping[str, str], name: str) -> None:
    """Raises `BadRequest` for agents that have no name or no model."""
    for one in (*models, *models.values()):
        check_length(one, name, 1, MAX_LABEL)
