"""What a request begins with, in the same words for everybody: the task of an episode that was given none.

A program may ask for something else before its task begins: whether the model is there, or what its quota is. Such a
probe is the same whatever the task, so no task is named by it. A request is a probe if it offers no tools and allows at
most `PROBE` tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ajet_proxy.core.conversation.history import read

PROBE: Final = 4
"""Tokens."""
SHORT: Final = 16
"""Messages."""
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def is_probe(fields: Mapping[str, Any]) -> bool:
    """Whether a request with these `fields`, of any route, asks before the task begins."""
    limits = [limit for name in _LIMITS if isinstance(limit := fields.get(name), int)]
    return not fields.get("tools") and bool(limits) and limits[0] <= PROBE


def begins(fields: Mapping[str, Any]) -> bool:
    """Whether there is no answer in what the request says, so that a conversation begins with it."""
    said = fields.get("messages", fields.get("input"))
    if fields.get("previous_response_id") is not None:
        return False
    return not (isinstance(said, list) and any(isinstance(one, Mapping) and _is_answer(one) for one in said))


def is_short(fields: Mapping[str, Any]) -> bool:
    """Whether so little is said that it may be read again for its digest."""
    said = fields.get("messages", fields.get("input"))
    return not isinstance(said, list) or len(said) <= SHORT


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")


def prompt_digest(route: str, fields: Mapping[str, Any]) -> str:
    """24 hexadecimal digits that stand for the words of a request to an engine's `route`; empty if it cannot be
    told."""
    history = read(route, fields, b"", exact=False)
    told = None if history is None else history.until(None)
    return "" if told is None else told[1]
