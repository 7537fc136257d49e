"""Tells the memory of conversations of a call, and asks it for a request, of whatever route."""

from __future__ import annotations

from typing import Any

from ajet_proxy.core.continuity.memory import Known, Memory, Outline


def remember(memory: Memory, asked: Outline, answer: dict[str, Any], call: str, ended: str) -> None:
    memory.remember(asked.ends(answer), asked.sought.shape, call, ended)


def recall(memory: Memory, asked: Outline) -> Known | str:
    return memory.recall(asked.sought)
