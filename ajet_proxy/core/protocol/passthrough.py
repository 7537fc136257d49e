"""A protocol that is usually carried over another route, for an engine that speaks it and does not have that route.

Request and answer pass as they are. No call comes of them: there is nobody to ask for ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.reading import Ask, Dialect, Reading
from ajet_proxy.core.protocol.request import Request
from ajet_proxy.core.trajectory.call import NO_CHAT_ROUTE


class Uncarried:
    """The `Dialect` that asks for what `dialect` carries, on the client's own route."""

    def __init__(self, dialect: Dialect) -> None:
        self.name = dialect.name
        self.path = self.target = dialect.path
        self.keep_alive = dialect.keep_alive

    def translate(self, request: Request) -> Request:
        return request

    def choices(self, request: Mapping[str, Any]) -> int:
        return 1

    def ask(self, request: Mapping[str, Any]) -> Ask:
        return Ask(skip=NO_CHAT_ROUTE)

    def reader(self, ask: Ask) -> Reading:
        return Reading(CHAT, ask)
