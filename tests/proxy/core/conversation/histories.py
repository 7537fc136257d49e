"""Histories for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.conversation.history import Kind, read


def history_of(kind: Kind, request: Mapping[str, Any], scope: bytes = b"scope", *, exact: bool = True) -> Any:
    """The history in `request`, which has one."""
    history = read(kind, request, scope, exact=exact)
    assert history is not None
    return history
