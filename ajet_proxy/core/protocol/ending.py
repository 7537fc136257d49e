"""Answers that were cut at their limit, though its engine says that it ended with a tool call.

vLLM says ``tool_calls`` of any document with a tool call, also of one whose tokens ran out. The last token of such an
answer is no stop token. Which tokens are, shows where other answers stopped. Of any other token the engine is asked: a
request for that one token, made certain by a bias, ends with ``stop`` or ``length``. If that cannot be known, an answer
was cut if it has as many tokens as its request allows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ajet_proxy.core.protocol.reading import UNREADABLE
from ajet_proxy.core.protocol.request import integer
from ajet_proxy.core.protocol.sampling import MOST_BIAS, one_token
from ajet_proxy.core.trajectory.call import Captured

IN_DOUBT = "tool_calls"
"""The one finish reason that does not tell."""


def stop_ids(asked: Mapping[str, Any]) -> frozenset[int | None]:
    """The tokens at which the answers end to what is `asked`, as far as they can be read."""
    listed = asked.get("stop_token_ids")
    return frozenset(integer({"id": one}, "id") for one in listed) if isinstance(listed, list) else frozenset()


def names_stop(choice: Captured, stop_ids: Collection[int | None]) -> bool:
    """Tell whether `choice` ended at a string or a token that its request names; `stop_ids` are the tokens."""
    return choice.stop_string is not None or choice.token_ids[-1] in stop_ids


def is_full(choice: Captured, limits: Sequence[str], asked: Mapping[str, Any]) -> bool:
    """Tell whether `choice` has as many tokens as was `asked` under one of the names in `limits`; False if the request
    does not say."""
    told = (integer(asked, name) for name in limits)
    limit = next((limit for limit in told if limit is not None), None)
    return limit is not None and len(choice.token_ids) >= limit


def question(model: str, token: int) -> tuple[str, dict[str, Any]]:
    """The route and the body that ask whether `token` stops."""
    return one_token(model, {token: MOST_BIAS}, temperature=0)


def answered(token: int, body: bytes) -> bool | None:
    """Tell whether `token` stops, by the engine's answer to `question`; None if that does not say."""
    try:
        [choice] = json.loads(body)["choices"]
        told = {"stop": True, "length": False}.get(choice["finish_reason"])
        return told if choice["token_ids"] == [token] else None
    except UNREADABLE:
        return None
