"""A recorded exchange once more: the agent's request, and the engine's answer in whatever pieces."""

from __future__ import annotations

import json

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Outcome
from tests.kit import tapes
from tests.kit.record_responses import FILE
from tests.kit.tapes import AGENT, PROXY, Tape
from tests.proxy.core.streams import run

RECORDED = {
    f"{kind}{name}": (told[name, AGENT], told[name, PROXY])
    for kind, told in (("", tapes.load()), ("responses-", tapes.load(FILE)))
    for name, asked_by in told if asked_by == PROXY
}  # fmt: skip
"""The tapes of each request, by its name: as the agent asked, and as the proxy did."""


def exchange_of(asked: Tape) -> Exchange:
    return Exchange(CAPTURED[asked.route], JsonBody(json.dumps(asked.request).encode()))


def replay(asked: Tape, answered: Tape, parts: list[bytes]) -> tuple[bytes, bytes, tuple[Outcome, ...]]:
    """``(what the client gets before the calls are settled, everything it gets, the outcomes)``."""
    exchange = exchange_of(asked)
    exchange.on_headers(answered.status, answered.headers["content-type"])
    early, late, outcomes = run(parts, exchange)
    return early, early + late, outcomes
