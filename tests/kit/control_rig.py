"""A caller of the control plane without HTTP: it asks as `ajet_proxy.io.control` does, over a ledger driven by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ajet_proxy.core.control import api
from ajet_proxy.core.control.asked import Answer, Asked, read
from ajet_proxy.core.control.runs import change_run, granted, put_run
from ajet_proxy.core.identity.keys import EVERYTHING, Claims
from ajet_proxy.core.ledger.parts import Part
from ajet_proxy.core.ledger.supervisors import Supervisors, Verdict
from ajet_sdk.routes import ROUTES, Route
from tests.kit.ledger_rig import LedgerRig

BASE = "http://proxy:8484"


def matched(method: str, path: str) -> tuple[Route, str]:
    """The control route at `path`, and the id in that."""
    parts = path.split("/")
    for route in ROUTES:
        pattern = route.path.split("/")
        if route.method == method and len(parts) == len(pattern) and all(
            want in ("{id}", part) for want, part in zip(pattern, parts, strict=True)
        ):
            return route, next((part for want, part in zip(pattern, parts, strict=True) if want == "{id}"), "")
    raise AssertionError(f"no control route {method} {path}")


class Caller:
    """Decides, applies the events, then reads the body. A supervisor says of each configuration that it is good."""

    def __init__(self, rig: LedgerRig | None = None) -> None:
        self.rig = rig or LedgerRig(watch=True)
        self.supervisors = Supervisors()

    def asked(
        self, method: str, path: str, body: Any = None, *, claims: Claims = EVERYTHING,
        query: Mapping[str, str] | None = None, trainer: str = "",
    ) -> Asked:
        route, name = matched(method, path)
        return Asked(
            route, claims, self.rig.commands, self.rig.presence, self.supervisors, self.rig.at, self.rig.id,
            lambda tenant, episode: f"ajet-{tenant}-{episode}", name, query or {},
            read(route, body, claims, self.rig.state.weights), trainer, BASE,
        )

    def decide(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """The answer, of which nothing has happened yet."""
        return self._decided(self.asked(method, path, body, **more))

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        """The answer in the end."""
        asked = self.asked(method, path, body, **more)
        while isinstance((answer := self._decided(asked)).events, Part):
            self.rig.run(answer.events)
            asked = replace(asked, before=(*asked.before, *answer.events))
        self.rig.run(answer.events)
        assert answer.status == 200
        shown = answer.body()
        assert shown is not None
        return shown

    def post(self, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        return self.ask("POST", path, body, **more)

    def _decided(self, asked: Asked) -> Answer:
        if (wished := {"put_run": put_run, "change_run": change_run}.get(asked.route.name)) is None:
            answer = api.decide(asked)
            answer.note()
            return answer
        wish = wished(asked)
        return granted(asked, wish, Verdict(digest="d") if wish.unchecked else None)
