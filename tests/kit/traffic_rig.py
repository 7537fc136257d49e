"""A ledger of users' traffic, every chat of which is to be judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.kit.ledger_rig import SETTINGS, LedgerRig

TRAFFIC = replace(SETTINGS, traffic_holdout=0.0, traffic_idle=50.0, traffic_backlog=3)


class TrafficRig(LedgerRig):
    """A chat is over after 50 seconds, and three may await a judgement."""

    def __init__(self, *, watch: bool = True, **other: Any) -> None:
        """`other` settings than those."""
        super().__init__(replace(TRAFFIC, **other), watch=watch)

    def chat(self, name: str, **options: Any) -> str:
        """A whole call of a user, whose chat is called `name`."""
        return self.call(name, traffic="chat", **options)

    def awaiting(self, name: str = "a", **options: Any) -> str:
        """The call of a chat that has been silent for so long that it awaits a judgement."""
        call = self.chat(name, **options)
        self.later(50)
        assert name in self.state.episodes.awaiting
        return call

    def fate(self, name: str = "a") -> tuple[str, str | None]:
        """The state of a chat, and why it is discarded."""
        known = self.state.episodes[name]
        return known.state, known.reason
